"""Samples of the host's time in calls that enqueue GPU work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def host_sampler(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Returns a sampler of the host's microseconds in one of `calls` consecutive calls. It synchronizes the GPU before
    and after."""

    def sample() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - begin
        torch.cuda.synchronize()
        return elapsed * 1e6 / calls

    return sample
