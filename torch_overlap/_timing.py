"""Samples that all ranks start together, in rounds in which variants take turns, and their statistics.

Warm-up and disturbances of a machine affect all variants of a round. A ratio is the median over rounds of the ratio
within a round. A collective is as slow as its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_overlap._C import ReduceOp, TorchComm

Samples = dict[str, list[float]]
MAX_LEAD_FACTOR = 32


class Spread(NamedTuple):
    """Median and interquartile range."""

    median: float
    iqr: float


def spread_of(samples: Sequence[float]) -> Spread:
    """Returns the median and IQR; the full range if there are fewer than four samples."""
    if len(samples) < 4:
        return Spread(statistics.median(samples), max(samples) - min(samples))
    low, _, high = statistics.quantiles(samples, n=4)
    return Spread(statistics.median(samples), high - low)


def ratio_of(samples: Mapping[str, Sequence[float]], ours: str, baseline: str) -> Spread:
    """Returns ours / baseline within each round."""
    return spread_of([a / b for a, b in zip(samples[ours], samples[baseline], strict=True)])


@dataclass(frozen=True)
class Stopwatch:
    """Times work that all ranks start together.

    device: where the work runs; on a CPU the host's clock is used. meet: makes the current stream wait for those of all
    ranks; on a CPU, the host. lead_cycles: cycles that a GPU idles before `meet`, so that the host has enqueued the
    timed work by then. If that was
        too short for some work, it doubles for that work next time, up to MAX_LEAD_FACTOR times. With 0, host time
        counts if the host is slower than the device.
    """

    device: torch.device
    meet: Callable[[], object]
    lead_cycles: int = 0

    def sampler(
        self, work: Callable[[], object], calls: int = 1, repeats: int = 1, before: Callable[[], object] | None = None
    ) -> Callable[[], float]:
        """Returns a function that takes a sample: microseconds of one of `calls` calls.

        Args:
            work: makes `calls` calls.
            calls: number of calls in `work`.
            repeats: number of times that `work` runs between the two readings of the clock.
            before: runs before the ranks meet; not timed.
        """
        if self.device.type == "cpu":

            def sample_host() -> float:
                if before is not None:
                    before()
                self.meet()
                begin = time.perf_counter()
                for _ in range(repeats):
                    work()
                return (time.perf_counter() - begin) * 1e6 / (calls * repeats)

            return sample_host
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        lead = self.lead_cycles

        def sample() -> float:
            nonlocal lead
            if before is not None:
                before()
            if lead:
                torch.cuda._sleep(lead)
            self.meet()
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            if start.query():  # the device did not wait for the host
                lead = min(2 * lead, MAX_LEAD_FACTOR * self.lead_cycles)
            end.synchronize()
            return float(start.elapsed_time(end)) * 1000 / (calls * repeats)

        return sample


def in_graph(call: Callable[[], object], count: int = 1) -> Callable[[], object]:
    """Captures `count` calls in a CUDA graph and returns its replay. Other threads, such as JAX's, may use the GPU
    meanwhile."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    return graph.replay


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """Returns the order of a round. Over as many rounds as there are names (twice that if their number is odd), each
    name has every position equally often, and follows each other name equally often. Side effects of a variant, such as
    heat or cached data, thus affect all others alike."""
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [names[(step + turn) % count] for step in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order


def interleave(samplers: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 3) -> Samples:
    """Calls every sampler once per round, in a changing order. The first `warmup` rounds do not count."""
    samples: Samples = {name: [] for name in samplers}
    for turn in range(rounds + warmup):
        for name in order_of(list(samplers), turn):
            sample = samplers[name]()
            if turn >= warmup:
                samples[name].append(sample)
    return samples


def slowest_rank(samples: Samples, comm: TorchComm) -> Samples:
    """Returns the maximum over ranks of each sample. Collective."""
    names = sorted(samples)
    table = torch.tensor([samples[name] for name in names], dtype=torch.float64, device=comm.get_device())
    comm.all_reduce(table, ReduceOp.MAX, async_op=False)
    return {name: row.tolist() for name, row in zip(names, table.cpu(), strict=True)}
