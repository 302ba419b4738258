"""A rank that is late: the others give up, and all may meet at the next attempt, or get an error that they cannot."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_overlap as to
from torch_overlap.testing import run_ranks

SOON, LONG = timedelta(seconds=0.4), timedelta(seconds=60)


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> to.TorchComm:
    return to.new_comm("local", "cpu", "late", store=store, rank=rank, size=size, timeout=timeout)


@pytest.mark.parametrize("early", [[0], [1], [0, 1], [1, 2], [0, 2]], ids=str)
def test_after_a_late_rank_all_meet_at_the_next_try(early: list[int]) -> None:
    store, size = dist.HashStore(), 3
    late = [r for r in range(size) if r not in early]

    def in_vain(rank: int) -> None:
        with pytest.raises(to.OperationTimeoutError, match="new_comm 'late': expected 3 ranks within 400 ms, got none"):
            make(store, rank, size, SOON)

    def together(rank: int) -> None:
        with make(store, rank, size, LONG) as comm:
            x = torch.tensor([rank])
            comm.all_reduce(x, to.ReduceOp.SUM, False)
            assert x.item() == 3

    with ThreadPoolExecutor(size) as ranks:
        for group in (early, late, early):
            list(ranks.map(in_vain, group))
        for _ in range(2):
            list(ranks.map(together, range(size)))


def run_late_over_sockets(rank: int, size: int, store: dist.Store) -> None:
    if rank == 0:
        with pytest.raises(to.OperationTimeoutError, match=r"got none of ranks \[1\]"):
            to.new_comm("gloo", "cpu", "late", store=store, rank=rank, size=size, timeout=timedelta(seconds=12))
        store.set("gave up", "1")
    else:
        store.wait(["gave up"])
    for _ in range(2):
        with to.new_comm("gloo", "cpu", "late", store=store, rank=rank, size=size, timeout=LONG) as comm:
            x = torch.tensor([rank])
            comm.all_reduce(x, to.ReduceOp.SUM, False)
            assert x.item() == 1


def test_processes_meet_after_one_was_late() -> None:
    run_ranks(run_late_over_sockets, 2, comm=False)


def run_end_of_a_set_up(comm: to.TorchComm, what: str, how: str) -> None:
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(4, torch.float32, comm))
    comm.barrier(False)
    if comm.get_rank() == 0:
        begin = time.monotonic()
        if how == "abort":
            threading.Timer(1.0, child.abort).start()
        else:  # if an operation is under way
            pending = child.recv(torch.zeros(1), 1, async_op=True, timeout=timedelta(seconds=1))
        why = (
            "was aborted"
            if how == "abort"
            else r"recv #\d+ on '.*': rank 1 did not arrive within the timeout of 1000 ms"
        )
        with pytest.raises(to.StateError, match=rf"expected 2 ranks, got none of ranks \[1\] before the end: .*{why}"):
            window.tensor_deregister() if what == "tensor_deregister" else SET_UPS[what](child)
        assert time.monotonic() - begin < 30  # the timeout is minutes
        if how == "failure":
            with pytest.raises(to.OperationTimeoutError):
                pending.wait()
    comm.barrier(False)
    child.abort()


ENDS = [(what, how) for what in ("split", "new_window", "buffer") for how in ("abort", "failure")]


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize(("what", "how"), [*ENDS, ("tensor_deregister", "abort")])
def test_an_abort_or_a_failure_ends_a_set_up_that_waits_for_ranks(what: str, how: str, backend: str) -> None:
    run_ranks(run_end_of_a_set_up, 2, what, how, backend=backend)


BUFFER = to.CommOverlapConfig(to.CommOverlapType.RS, to.CommOverlapMethod.BULK, [8, 4], torch.float32, 2)
SET_UPS = {
    "split": lambda comm: comm.split([0, 1]),
    "new_window": lambda comm: comm.new_window(to.symmetric_empty(4, torch.float32, comm)),
    "buffer": lambda comm: to.CommOverlapBase(comm, BUFFER),
}


def run_set_up_without_a_rank(comm: to.TorchComm, what: str) -> None:
    child = comm.split([0, 1])
    assert child is not None
    if comm.get_rank() == 0:
        child.set_timeout(timedelta(seconds=1))
        begin = time.monotonic()
        broken = rf"got none of ranks \[1\]; '{child.get_name()}' is aborted: .*reconfigure it, or make a new one"
        with pytest.raises(to.OperationTimeoutError, match=broken):
            SET_UPS[what](child)
        assert time.monotonic() - begin < 1 + 30
        assert child.is_aborted()
        with pytest.raises(to.StateError, match=r"split: expected a live communicator, .* which was aborted"):
            child.split([0, 1])
    comm.barrier(False)
    if comm.get_rank() == 1:  # nor does it wait for ranks that have given up
        child.set_timeout(timedelta(seconds=1))
        with pytest.raises(to.Error):
            SET_UPS[what](child)
        assert child.is_aborted()
    comm.barrier(False)
    child.finalize()
    again = comm.split([0, 1])
    assert again is not None
    SET_UPS[what](again)
    again.abort()


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("what", SET_UPS)
def test_a_set_up_that_a_rank_misses_breaks_the_communicator(what: str, backend: str) -> None:
    run_ranks(run_set_up_without_a_rank, 2, what, backend=backend)


def matmul(comm: to.TorchComm) -> object:
    return to.ops.all_gather_matmul(torch.ones(2, 4), [torch.ones(3, 4)], comm, algorithm="p2p")


WAITS = {
    **SET_UPS,
    "tensor_deregister": lambda comm, window: window.tensor_deregister(),
    "wait_signal": lambda comm, window: window.wait_signal(1, False),
    "wait_signal, async": lambda comm, window: window.wait_signal(1, True).wait(),
    "operation over shared memory": lambda comm, window: matmul(comm),
}


def run_rank_that_left(comm: to.TorchComm, what: str, how: str, is_late: bool) -> None:
    child = comm.split([0, 1])
    assert child is not None
    child.set_timeout(timedelta(minutes=10))
    window = child.new_window(to.symmetric_empty(4, torch.float32, comm))
    matmul(child)
    name = child.get_name()
    comm.barrier(False)
    if comm.get_rank() == 1:
        time.sleep(0.3 if is_late else 0)
        if how == "dropped":
            del child, window
            gc.collect()
        else:
            child.abort() if how == "aborted" else child.finalize()
        comm.barrier(False)
        return
    if not is_late:
        time.sleep(0.3)
    begin = time.monotonic()
    ended = "finalized" if how == "finalized" else "aborted"
    with pytest.raises(to.Error, match=rf"rank 1 has left \(communicator '{name}' was {ended}\)") as raised:
        WAITS[what](child) if what in SET_UPS else WAITS[what](child, window)
    assert type(raised.value) is to.Error
    assert time.monotonic() - begin < 30  # the timeout is minutes
    comm.barrier(False)
    with pytest.raises(to.Error if what == "operation over shared memory" else to.StateError):
        child.split([0, 1])  # it is broken, as after other operations
    child.abort()


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "meanwhile"])
@pytest.mark.parametrize("how", ["finalized", "aborted", "dropped"])
@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_left_ends_what_waits_for_it(what: str, how: str, is_late: bool) -> None:
    run_ranks(run_rank_that_left, 2, what, how, is_late, backend="local")


def run_two_clocks(comm: to.TorchComm) -> None:
    """Rank 2 is missing. Rank 1's timeout ends first, but rank 0 does not wait for rank 1."""
    comm.barrier(False)
    comm.set_timeout(timedelta(seconds=2))
    if comm.get_rank() == 2:
        time.sleep(6)
        return
    time.sleep(1 - comm.get_rank())
    with pytest.raises(
        to.OperationTimeoutError, match=r"expected 3 ranks within 2000 ms, got none of ranks \[(1, )?2\]"
    ):
        comm.split([0, 1, 2])


def test_a_rank_that_gave_up_is_not_the_one_that_is_missing() -> None:
    run_ranks(run_two_clocks, 3, backend="local")


def run_last_words(comm: to.TorchComm) -> None:
    """A signal that a rank sends before it leaves is received."""
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(4, torch.float32, comm))
    if comm.get_rank() == 1:
        with pytest.raises(to.InvalidValueError, match="timeout >= 0"):
            child.split([0, 1], timeout=timedelta(seconds=-1))
        time.sleep(0.2)  # rank 0 waits, and polls for ranks that have left
        window.signal(0, False)
        child.abort()
    else:
        window.wait_signal(1, False)
    comm.barrier(False)
    if comm.get_rank() == 0:
        with pytest.raises(to.InvalidValueError, match=r"rank 1 .* could not take part: .* timeout >= 0"):
            child.split([0, 1])
        with pytest.raises(to.Error, match="rank 1 has left"):
            window.wait_signal(1, False)
    child.abort()


def test_what_a_rank_did_before_it_left_counts() -> None:
    run_ranks(run_last_words, 2, backend="local")
