"""Ranks of a call that are the processes of torchrun, all of which make the call."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch_overlap.testing._body import Job, environment, run_body
from torch_overlap.testing._forkserver import START_SECONDS
from torch_overlap.testing._pool import GRACE_SECONDS
from torch_overlap.testing._report import Outcome, pickled

VARIABLE = "TORCH_OVERLAP_TEST_RANKS"


def is_chosen() -> bool:
    """Returns True if this process is one of torchrun's, whose ranks replace threads."""
    chosen = os.environ.get(VARIABLE, "threads")
    if chosen not in ("threads", "torchrun"):
        raise ValueError(f"run_ranks: expected {VARIABLE} to be threads or torchrun, got {chosen!r}")
    if chosen == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"run_ranks: expected a process that torchrun started with {VARIABLE}=torchrun, got no "
                         "WORLD_SIZE in the environment")  # fmt: skip
    return chosen == "torchrun"


def run_here(job: Job, fn: Callable[..., Any], args: tuple[Any, ...],
             changes: Mapping[str, str | None]) -> dict[int, Outcome]:  # fmt: skip
    """Runs `fn` in this process, over gloo, if it is one of the first `job.size`; returns the outcomes of all of
    these."""
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job.size > started:
        return {0: Outcome(False, skipped=f"needs {job.size} ranks, torchrun started {started}")}
    store = _store()
    if rank < job.size:
        with environment(changes):
            outcome = run_body(replace(job, backend="gloo"), rank, store, fn, args)
        store.set(_key(job, rank), pickled(outcome))
    # Each rank gets its own time, plus that of ranks that see another rank's failure late.
    store.set_timeout(timedelta(seconds=job.timeout + GRACE_SECONDS))
    outcomes = {}
    for other in range(job.size):
        try:
            outcomes[other] = pickle.loads(store.get(_key(job, other)))
        except RuntimeError as error:
            outcomes[other] = Outcome(False, error=f"did not end within {job.timeout:g} s: {error}")
    return outcomes


def _key(job: Job, rank: int) -> str:
    return f"{job.name}/outcome{rank}"


@functools.cache
def _store() -> Any:
    import torch.distributed as c10d

    dist: Any = c10d
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    shared = dist.PrefixStore("torch_overlap.testing", store)
    # On a loaded machine ranks may be ready at very different times: the time of a call begins when all are.
    if shared.add("ready", 1) == int(os.environ["WORLD_SIZE"]):
        shared.set("all ready", b"")
    shared.wait(["all ready"])
    return shared
