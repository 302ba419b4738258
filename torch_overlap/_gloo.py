"""Creates c10d's ProcessGroupGloo for the C++ gloo backend; the torch wheel exports its constructor to Python only."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_overlap import _C


def make_gloo(
    store: Any, rank: int, size: int, timeout: timedelta, hostname: str | None, interface: str | None, lazy: bool
) -> Any:
    """Returns a c10d gloo Backend that listens on `hostname` or `interface` (at most one), or else on gloo's default.
    With `lazy`, ranks connect at their first message."""
    begin = time.monotonic()
    try:
        return _connect(store, rank, size, timeout, hostname, interface, lazy)
    except RuntimeError as error:  # includes c10d's own errors, which callers that catch torch_overlap.Error would miss
        seconds = timeout.total_seconds()
        kind = _C.OperationTimeoutError if time.monotonic() - begin >= seconds else _C.Error
        text = str(error).splitlines()[0]
        raise kind(
            f"new_comm: expected gloo to connect {size} ranks within {seconds * 1000:.0f} ms, got: {text}; "
            "look at the other ranks"
        ) from error


def _connect(
    store: Any, rank: int, size: int, timeout: timedelta, hostname: str | None, interface: str | None, lazy: bool
) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    if hostname is not None:
        options._devices = [gloo.create_device(hostname=hostname, lazy_init=lazy)]
    elif interface is not None:
        options._devices = [gloo.create_device(interface=interface, lazy_init=lazy)]
    else:
        options._devices = [gloo.create_default_device(lazy_init=lazy)]
    return gloo(store, rank, size, options)


def install() -> None:
    if dist.is_gloo_available():
        _C._set_gloo_factory(make_gloo)
