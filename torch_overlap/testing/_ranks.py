"""run_ranks: runs one function on every rank."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_overlap.testing._body import Job, Task, environment, run_body
from torch_overlap.testing._pool import GRACE_SECONDS, call_name, pool
from torch_overlap.testing._report import Outcome, values
from torch_overlap.testing._torchrun import is_chosen, run_here


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout: float = 180,
    comm: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Calls `fn(comm, *args)` on `size` ranks, with a fresh communicator, and returns the results by rank.

    With `comm=False` it calls `fn(rank, size, store, *args)` instead; `store` belongs to this call only.

    Ranks are processes that are reused between calls (importing torch is slow), so `fn` must be a module-level function
    that leaves no global state; arguments and results are pickled. With the backend "local" ranks are threads of this
    process, and `fn` may be any callable. With "fake" the ranks run one after the other, in this thread.

    If every process of a torchrun makes the same calls (from pytest, for example) and TORCH_OVERLAP_TEST_RANKS is
    "torchrun", these processes are the ranks instead of threads, over gloo; a call of more ranks than processes is
    skipped.

    Communicators are finalized after `fn`. If `fn` raises, they are aborted, which releases the ranks that wait for
    this one. Their timeout is half of `timeout`, and they raise rather than end the process. If a rank does not return
    within `timeout`, or dies, all rank processes are replaced at the next call.

    Args:
        fn: the function.
        size: number of ranks.
        args: further arguments of `fn`.
        backend: of the communicator.
        device: "cuda" means the GPU of that rank (gpu_of()).
        timeout: of the call, in seconds.
        comm: if False, makes no communicator.
        env: environment variables during the call; None unsets one.

    Raises:
        RanksFailed: with the traceback of every rank that failed.
    """
    if size < 1:
        raise ValueError(f"run_ranks: expected size >= 1, got {size}")
    job = Job(call_name(), size, backend, device, float(timeout), comm)
    what = f"{getattr(fn, '__qualname__', fn)} on {size} ranks of {backend}"
    changes = dict(env or {})
    if comm and backend == "local":
        run = run_here if is_chosen() else _run_threads
        return values(what, run(job, fn, args, changes))
    if comm and backend == "fake":
        with environment(changes):
            return values(what, {rank: run_body(job, rank, None, fn, args) for rank in range(size)})

    file, qualname = _locate(fn)
    data = pickle.dumps(args)

    def make_task(rank: int, port: int) -> Task:
        return Task(job, rank, port, changes, list(sys.path), fn.__module__, file, qualname, data)

    return values(what, pool().run(make_task, job))


def _locate(fn: Callable[..., Any]) -> tuple[str, str]:
    qualname = getattr(fn, "__qualname__", "")
    file = getattr(sys.modules.get(getattr(fn, "__module__", "")), "__file__", None)
    if not qualname or "<" in qualname or file is None:
        raise TypeError(f"run_ranks: expected a module-level function, got {fn!r}; rank processes find it by its name")
    return str(Path(file).resolve()), qualname


def _run_threads(job: Job, fn: Callable[..., Any], args: tuple[Any, ...],
                 changes: Mapping[str, str | None]) -> dict[int, Outcome]:  # fmt: skip
    import torch.distributed as c10d

    dist: Any = c10d
    store = dist.HashStore()
    outcomes: dict[int, Outcome] = {}
    comms: dict[int, Any] = {}
    changed = threading.Condition()

    def body(rank: int) -> None:
        outcome = run_body(job, rank, store, fn, args, lambda comm: comms.__setitem__(rank, comm))
        with changed:
            outcomes[rank] = outcome
            changed.notify()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(job.size)]
    with environment(changes):
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + job.timeout
        with changed:
            while len(outcomes) < job.size and time.monotonic() < deadline:
                changed.wait(deadline - time.monotonic())
                if any(not outcome.ok for outcome in outcomes.values()):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        late = [rank for rank in range(job.size) if rank not in outcomes]
        for rank in late:
            if rank in comms:
                comms[rank].abort()
        for thread in threads:
            thread.join(GRACE_SECONDS if late else None)
    for rank in late:
        details = outcomes[rank].error if rank in outcomes else _stack(threads[rank])
        outcomes[rank] = Outcome(
            False, error=f"did not end within {job.timeout:g} s; its communicator was aborted\n{details}"
        )
    return outcomes


def _stack(thread: threading.Thread) -> str:
    import traceback

    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
