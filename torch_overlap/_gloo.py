"""Gives the C++ gloo backend its c10d ProcessGroupGloo, which the torch wheel lets only Python make."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_overlap import _C


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta, hostname: str | None, interface: str | None) -> Any:
    """A c10d gloo Backend that listens on `hostname` or `interface` (at most one of them), else on gloo's choice."""
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    if hostname is not None:
        options._devices = [gloo.create_device(hostname=hostname)]
    elif interface is not None:
        options._devices = [gloo.create_device(interface=interface)]
    else:
        options._devices = [gloo.create_default_device()]
    return gloo(store, rank, size, options)


def install() -> None:
    if dist.is_gloo_available():
        _C._set_gloo_factory(make_gloo)
