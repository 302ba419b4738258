"""Ranks that do not call, and communicators that end: errors name the cause, in time, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, PIPELINE, RING, RS, Bulk, Case, External, Gather, Ranks, Scatter, make, store_group

import torch_overlap as to
from torch_overlap.testing import run_ranks

SECONDS = 1.5  # limit of a wait that expires
OUTSIDE_SECONDS = 15.0  # limit of a group of callbacks: all its waits have the same

METHODS: dict[str, tuple[str, Callable[[Ranks], Case]]] = {
    "ag": ("split_overlap_ag", Gather),
    "ag atomic": ("atomic_gemm_overlap_ag", lambda comm: Gather(comm, atomic=True)),
    "rs ring": ("split_overlap_rs", lambda comm: Scatter(comm, RING)),
    "rs pipeline": ("split_overlap_rs", lambda comm: Scatter(comm, PIPELINE)),
    "rs atomic": ("atomic_gemm_overlap_rs", lambda comm: Scatter(comm, PIPELINE, atomic=True)),
    "bulk ag": ("bulk_overlap", lambda comm: Bulk(comm, AG)),
    "bulk rs": ("bulk_overlap", lambda comm: Bulk(comm, RS)),
    "external": ("bulk_overlap_external_ag", lambda comm: External(comm, lender="bulk")),
}


def call_of(name: str, case: Case) -> Callable[[], None]:
    """Returns the call by itself, with arbitrary data."""
    b, tokens = case.buffer, case.tokens
    if name == "external":
        return lambda: b.bulk_overlap_external_ag(b)
    if name.startswith("bulk"):
        kind = AG if name == "bulk ag" else RS
        return lambda: b.bulk_overlap(
            torch.ones(4, 4), True, torch.ones(4, 4), False, torch.empty(4, 4), comm_type=kind
        )
    method = getattr(b, METHODS[name][0])
    if name.startswith("ag"):
        x, out = torch.ones(case.rows, case.k), torch.empty(tokens, case.n)
        return lambda: method(torch.ones(case.n, case.k), True, x, False, out)
    x, out = torch.ones(tokens, case.k), torch.empty(case.rows, case.n)
    return lambda: method(torch.ones(case.n, case.k), True, x, False, None, rs_output=out)


def new_comm(rank: int, size: int, store: Any, **options: Any) -> to.TorchComm:
    return to.new_comm(
        "gloo",
        "cpu",
        "overlap_failures",
        store=store,
        rank=rank,
        size=size,
        timeout=timedelta(seconds=60),
        abort_process_on_timeout_or_error=False,
        **options,
    )


def run_late(rank: int, size: int, store: Any, seed: int, name: str, outside: bool) -> float:
    """The last rank does not make the second call."""
    seconds = OUTSIDE_SECONDS if outside else SECONDS
    group = store_group(rank, size, store, seconds=seconds) if outside else new_comm(rank, size, store)
    case, other = METHODS[name][1](group), Gather(group)
    op = METHODS[name][0]
    call = call_of(name, case)
    call()
    took = 0.0
    if rank != size - 1:
        if isinstance(group, to.TorchComm):
            group.set_timeout(timedelta(seconds=seconds))
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError) as info:
            call()
        took = time.monotonic() - begin
        text = str(info.value)
        assert f"rank {size - 1} to begin operation 2 within {seconds * 1000:.0f} ms, got operation 1" in text, text
        for _ in range(2):
            with pytest.raises(
                to.StateError, match=rf"^{op}: expected a usable buffer, .*{size - 1} to begin.*make a new one"
            ):
                call()
        store.set(f"expired/{rank}", "")
    store.wait([f"expired/{r}" for r in range(size - 1)], timedelta(seconds=seconds + 60))
    if isinstance(group, to.TorchComm):
        group.set_timeout(timedelta(seconds=60))
    other.step(seed)  # another buffer of the same ranks
    if isinstance(group, to.TorchComm):
        group.finalize()
    return took


@pytest.mark.parametrize("name", METHODS)
def test_a_rank_that_does_not_come_is_named(name: str, seed: int) -> None:
    for took in run_ranks(run_late, 3, seed, name, False, comm=False, timeout=120)[:2]:
        assert SECONDS * 0.9 < took < SECONDS + 30


@pytest.mark.slow
def test_a_rank_of_a_group_that_does_not_come_is_named(seed: int) -> None:
    """The timeout of a group is set when it is made and bounds all its waits, including those before the second
    call."""
    for took in run_ranks(run_late, 3, seed, "ag", True, comm=False, timeout=180)[:2]:
        assert OUTSIDE_SECONDS * 0.9 < took < OUTSIDE_SECONDS + 30


def run_absent(comm: to.TorchComm) -> None:
    """A buffer that one rank does not make: an error on the others, and the communicator stays usable."""
    if comm.get_rank() == 0:
        comm.set_timeout(timedelta(seconds=1))
        with pytest.raises(to.OperationTimeoutError):
            make(comm, RS, RING, (8, 16), torch.float32)


def test_a_buffer_that_one_rank_does_not_make() -> None:
    run_ranks(run_absent, 2)


def run_dead(comm: to.TorchComm, seed: int, how: str) -> None:
    cases = {name: make_one(comm) for name, (_, make_one) in METHODS.items()}
    for name, case in cases.items():
        call_of(name, case)()
    comm.barrier(async_op=False)
    if how == "finalize":
        comm.finalize()
    else:
        comm.abort()
    word = "finalized" if how == "finalize" else "aborted"
    for name, case in cases.items():
        with pytest.raises(
            to.StateError, match=rf"^{METHODS[name][0]}: expected a live communicator, got '.*', which (is|was) {word}"
        ):
            call_of(name, case)()
        case.buffer.get_buffer().zero_()  # the memory stays
    with pytest.raises(to.StateError, match=word):
        make(comm, RS, RING, (8, 16), torch.float32)


@pytest.mark.parametrize("how", ["finalize", "abort"])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unreachable"])
@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_after_the_end_of_the_communicator(backend: str, how: str, mapped: bool, seed: int) -> None:
    run_ranks(run_dead if mapped else run_dead_unreachable, 2, seed, how, backend=backend)


def run_dead_unreachable(comm: to.TorchComm, seed: int, how: str) -> None:
    pretence = to._C._PretendUnreachable()
    try:
        run_dead(comm, seed, how)
    finally:
        del pretence


def run_reconfigure(rank: int, size: int, store: Any, seed: int) -> None:
    comm = new_comm(rank, size, store, enable_reconfigure=True)
    handles: list[Any] = [None] * size
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    case = Scatter(comm, RING)
    case.step(seed)
    id = to.create_comm_overlap_buffer(comm, RS, PIPELINE, (8, 16), torch.float32)
    for generation, order in enumerate([[1, 0, 2], [2, 0]], start=1):
        if rank not in order:
            to.destroy_comm_overlap_buffer(id)
            comm.abort()
            return
        comm.reconfigure(generation, [handles[r] for r in order])
        with pytest.raises(
            to.StateError,
            match=r"^split_overlap_rs: expected the members that the buffer was made for, got "
            "'overlap_failures' after reconfigure.*make a new buffer",
        ):
            call_of("rs ring", case)()
        case = Scatter(comm, RING)  # of the new members
        case.step(seed + generation)
        old, id = id, to.create_comm_overlap_buffer(comm, RS, PIPELINE, (8, 16), torch.float32)
        assert id > old
        assert id == to.create_comm_overlap_buffer(comm, RS, PIPELINE, (8, 16), torch.float32)
        for held in (old, id):
            to.destroy_comm_overlap_buffer(held)
        out = torch.full(
            (8 // comm.get_size(), 16) if comm.get_size() == 2 else (min(3, 8 - 3 * comm.get_rank()), 16), -1.0
        )
        to.comm_overlap_buffer(id).split_overlap_rs(
            torch.ones(16, 4), True, torch.ones(8, 4), False, None, rs_output=out
        )
        assert (out == 4 * comm.get_size()).all()
    to.destroy_comm_overlap_buffer(id)
    comm.finalize()


def test_after_reconfigure(seed: int) -> None:
    run_ranks(run_reconfigure, 3, seed, comm=False)


def run_dropped(comm: to.TorchComm) -> None:
    """One rank drops its buffer between calls: the others get an error, and may drop theirs."""
    buffer = make(comm, AG, BULK, (8, 16), torch.float32)
    comm.barrier(async_op=False)
    if comm.get_rank() == 1:
        del buffer
        return
    comm.set_timeout(timedelta(seconds=1))
    with pytest.raises(to.OperationTimeoutError, match="rank 1 to begin operation 1 within 1000 ms, got operation 0"):
        buffer.bulk_overlap(torch.ones(4, 4), True, torch.ones(4, 4), False, torch.empty(4, 4), comm_type=AG)


def test_a_rank_that_dropped_its_buffer() -> None:
    run_ranks(run_dropped, 2)
