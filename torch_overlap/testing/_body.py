"""One rank's execution of one call: makes its communicator, runs the function, and cleans up."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_overlap._gpus import gpu_of
from torch_overlap.testing._report import Outcome


@dataclass
class Job:
    """One call of run_ranks, common to all its ranks."""

    name: str
    size: int
    backend: str
    device: str
    timeout: float
    comm: bool


@dataclass
class Task:
    """One rank's share of a call. `args` is pickled, since it may hold classes of the test's own module."""

    job: Job
    rank: int
    store_port: int
    env: dict[str, str | None]
    path: list[str]
    module: str
    file: str
    qualname: str
    args: bytes


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables (None unsets one), and restores the previous values."""
    before = {key: os.environ.get(key) for key in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for key, value in changes.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def run_body(job: Job, rank: int, store: Any, fn: Callable[..., Any], args: tuple[Any, ...],
             made: Callable[[Any], None] = lambda comm: None) -> Outcome:  # fmt: skip
    """Runs `fn` as `rank` and turns any result or exception into an Outcome. `made` is called with the communicator."""
    comm: Any = None
    try:
        if not job.comm:
            return Outcome(True, fn(rank, job.size, store, *args))
        from torch_overlap import new_comm

        comm = new_comm(
            job.backend, _device(job, rank), job.name, store=store, rank=rank, size=job.size,
            timeout=timedelta(seconds=job.timeout / 2), abort_process_on_timeout_or_error=False,
        )  # fmt: skip
        made(comm)
        value = fn(comm, *args)
        if not comm.is_finalized() and not comm.is_aborted():
            comm.finalize()
        return Outcome(True, value)
    except BaseException as error:
        text = traceback.format_exc()
        skipped = type(error).__name__ == "Skipped"
        if comm is not None and not comm.is_finalized():
            # An abort releases the other ranks, which may be waiting for this one. All ranks skip together.
            _suppress_errors(comm.finalize if skipped else comm.abort)
        return Outcome(False, skipped=str(error)) if skipped else Outcome(False, error=text)
    finally:
        if threading.current_thread() is threading.main_thread():
            _end_process_group()


def _device(job: Job, rank: int) -> Any:
    import torch

    return gpu_of(rank) if job.device == "cuda" else torch.device(job.device)


def _end_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        _suppress_errors(dist.destroy_process_group)


def _suppress_errors(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception:
        traceback.print_exc()
