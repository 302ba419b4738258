"""reconfigure: survivors form the communicator again, smaller, larger, in another order; and invalid calls."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap.testing import run_ranks

BACKENDS = ["gloo", "local"]


def make(backend: str, rank: int, size: int, store: Any, name: str = "again", **options: Any) -> to.TorchComm:
    options = {"timeout": timedelta(seconds=60), "enable_reconfigure": True, **options}
    return to.new_comm(backend, "cpu", name, store=store, rank=rank, size=size, **options)


def run(fn: Any, size: int, backend: str, *args: Any) -> list[Any]:
    """Runs fn(rank, size, store, backend, *args) on processes, or on threads for `local`."""
    if backend != "local":
        return run_ranks(fn, size, backend, *args, comm=False)
    import torch.distributed as dist

    store, results, errors = dist.HashStore(), {}, {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, size, store, backend, *args)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    if errors:
        raise next(iter(errors.values()))
    return [results[rank] for rank in range(size)]


def handles_of(comm: to.TorchComm) -> list[str]:
    handles: list[Any] = [None] * comm.get_size()
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    assert len(set(handles)) == comm.get_size()
    return handles


def check_values(comm: to.TorchComm, ranks: list[int], me: int) -> None:
    """Checks that all members, known by a number of their own, are present and in the order of `ranks`."""
    assert comm.get_size() == len(ranks)
    assert comm.get_rank() == ranks.index(me)
    assert comm.get_ranks_in_world() == list(range(len(ranks)))
    out = torch.full((len(ranks), 2), -1.0)
    comm.all_gather_single(out, torch.full((2,), float(me)), async_op=False)
    assert out[:, 0].tolist() == ranks == out[:, 1].tolist()
    x = torch.tensor([me + 1.0])
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait()
    assert x.item() == sum(ranks) + len(ranks)


def run_shrink(rank: int, size: int, store: Any, backend: str, how: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    lost = 1
    if rank == lost:
        comm.abort()
        return
    if how == "abort":
        comm.abort()
    elif how == "failure":
        with pytest.raises(to.Error):
            comm.all_reduce(torch.ones(1000), to.ReduceOp.SUM, async_op=True).wait()
        with pytest.raises(to.Error):
            comm.barrier(False)
    kept = [r for r in range(size) if r != lost]
    named = [handles[r] for r in kept]
    work = comm.reconfigure(7, set(named) if how == "failure" else named)
    assert work.is_completed()
    work.wait()
    assert not comm.is_aborted()
    assert comm.get_generation() == 1
    assert comm.get_init_handle() == handles[rank]
    if backend != "local":
        assert to.get_comm("again") is comm
    check_values(comm, kept, rank)
    half = comm.split([comm.get_rank()])
    assert half is not None
    half.finalize()
    comm.finalize()


@pytest.mark.parametrize("how", ["healthy", "abort", "failure"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_form_a_smaller_communicator(backend: str, how: str) -> None:
    run(run_shrink, 3, backend, how)


def run_stopped(rank: int, size: int, store: Any) -> None:
    """A rank is stopped, given up by the others, and continues: it gets an error, and disturbs no other rank."""
    comm = make("gloo", rank, size, store)
    handles = handles_of(comm)
    stopped = size - 1
    store.set(f"pid/{rank}", str(os.getpid()))
    pid = int(store.get(f"pid/{stopped}"))
    comm.set_timeout(timedelta(seconds=1))
    stop = threading.Timer(0.2, os.kill, (pid, signal.SIGSTOP))
    if rank == 0:
        stop.start()

    def until_it_fails() -> None:
        while True:
            comm.all_reduce(torch.ones(1000), to.ReduceOp.SUM, async_op=True).wait()

    try:
        with pytest.raises(to.Error):
            until_it_fails()
        if rank == stopped:
            with pytest.raises(to.Error):
                comm.reconfigure(1, handles, timeout=timedelta(seconds=2))
            store.set("went on", "")
            return
        comm.reconfigure(1, handles[:stopped], timeout=timedelta(seconds=60))
        comm.set_timeout(timedelta(seconds=60))
        check_values(comm, list(range(stopped)), rank)
    finally:
        if rank == 0:
            stop.join()  # a late one would stop the process for good
            os.kill(pid, signal.SIGCONT)
    store.wait(["went on"], timedelta(seconds=60))
    check_values(comm, list(range(stopped)), rank)
    comm.finalize()


def test_a_stopped_rank_that_goes_on_finds_itself_left_out() -> None:
    run_ranks(run_stopped, 3, comm=False)


def run_order(rank: int, size: int, store: Any, backend: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    order = [2, 0, 1]
    comm.reconfigure(1, [handles[r] for r in order])
    check_values(comm, order, rank)
    comm.reconfigure(2, set(handles))  # handles of one generation keep its order
    check_values(comm, order, rank)
    assert comm.get_generation() == 2
    comm.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_position_in_a_list_is_the_rank_and_a_set_keeps_the_order(backend: str) -> None:
    run(run_order, 3, backend)


def run_lives(rank: int, size: int, store: Any, backend: str) -> None:
    for life in range(3):  # with the same uuids, in another order
        comm = make(backend, rank, size, store)
        handles = handles_of(comm)
        for uuid in (1, 2):
            order = [(r + life + uuid) % size for r in range(size)]
            comm.reconfigure(uuid, [handles[r] for r in order])
            check_values(comm, order, rank)
            half = comm.split([0]) if comm.get_rank() == 0 else comm.split(list(range(1, size)))
            assert half is not None
            half.finalize()
        comm.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_life_of_a_name_may_use_the_same_uuids(backend: str) -> None:
    run(run_lives, 3, backend)


def run_grow(rank: int, size: int, store: Any, backend: str, ordered: bool) -> None:
    newcomer = rank == size - 1
    comm = make(backend, 0, 1, store) if newcomer else make(backend, rank, size - 1, store)
    store.set(f"handle/{rank}", comm.get_init_handle())
    handles = [store.get(f"handle/{r}").decode() for r in range(size)]
    if newcomer:
        time.sleep(0.2)
    if ordered:
        comm.reconfigure(3, [handles[-1], *handles[:-1]])
        check_values(comm, [size - 1, *range(size - 1)], rank)
    else:
        comm.reconfigure(3, set(handles))
        check_values(comm, list(range(size)), rank)
    comm.finalize()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_member_joins(backend: str, ordered: bool) -> None:
    run(run_grow, 3, backend, ordered)


def run_missing(rank: int, size: int, store: Any, backend: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    if rank == 1:
        store.wait(["expired/0", "expired/2"], timedelta(seconds=60))
        # Late: the others have already left. The store may be slow on a loaded machine.
        with pytest.raises(to.OperationTimeoutError, match="got none of"):
            comm.reconfigure(10, handles, timeout=timedelta(seconds=15))
        comm.abort()
        return
    begin = time.monotonic()
    with pytest.raises(to.OperationTimeoutError, match=r"expected all 3 members .* under uuid 10") as raised:
        comm.reconfigure(10, handles, timeout=timedelta(seconds=3))
    assert time.monotonic() - begin < 3 + 30
    store.set(f"expired/{rank}", "")
    assert handles[1] in str(raised.value)
    assert handles[0] not in str(raised.value)
    assert comm.is_aborted()
    with pytest.raises(to.StateError, match="expected a live communicator, got 'again', which was aborted"):
        comm.barrier(False)
    with pytest.raises(to.InvalidValueError, match="expected a uuid that 'again' has not used, got 10"):
        comm.reconfigure(10, [handles[0], handles[2]])
    comm.reconfigure(11, [handles[0], handles[2]])
    check_values(comm, [0, 2], rank)
    comm.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_does_not_come_is_named_and_may_be_left_out_of_the_next_try(backend: str) -> None:
    run(run_missing, 3, backend)


def run_disagree(rank: int, size: int, store: Any, backend: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    mine = handles if rank == 0 else list(reversed(handles))
    with pytest.raises(to.InvalidValueError, match="expected the same request under uuid 5 on all members") as raised:
        comm.reconfigure(5, mine)
    for handle in handles:
        assert handle in str(raised.value)
    comm.reconfigure(6, handles)
    check_values(comm, [0, 1], rank)
    comm.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_that_want_different_things_all_get_an_error(backend: str) -> None:
    run(run_disagree, 2, backend)


def run_works(rank: int, size: int, store: Any, backend: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    called = []
    comm.register_pre_hook(lambda name, op_id, args: called.append(name))
    pending = comm.recv(torch.zeros(4), 1 - rank, async_op=True)
    comm.reconfigure(1, handles)
    with pytest.raises(to.Error):
        pending.wait()
    assert pending.status() == to.WorkStatus.ERROR
    called.clear()
    comm.barrier(False)
    assert called == [to.OpName.barrier]
    check_values(comm, [0, 1], rank)
    comm.finalize()
    with pytest.raises(to.StateError, match="which was finalized"):
        comm.reconfigure(2, handles)


@pytest.mark.parametrize("backend", BACKENDS)
def test_works_of_before_end_with_an_error_and_hooks_stay(backend: str) -> None:
    run(run_works, 2, backend)


def run_abort(rank: int, size: int, store: Any, backend: str) -> None:
    comm = make(backend, rank, size, store)
    handles = handles_of(comm)
    threading.Timer(2, comm.abort).start()  # it waits by then
    begin = time.monotonic()
    with pytest.raises(to.StateError, match="expected no abort"):
        comm.reconfigure(1, [*handles, "nobody"])
    assert time.monotonic() - begin < 2 + 30
    assert comm.is_aborted()


def test_abort_ends_a_reconfigure_that_waits() -> None:
    run(run_abort, 1, "gloo")


def fake(**options: Any) -> to.TorchComm:
    return to.new_comm("fake", "cpu", rank=1, size=3, enable_reconfigure=True, **options)


def test_what_it_refuses() -> None:
    plain = to.new_comm("fake", "cpu", rank=1, size=3)
    assert plain.is_abort_supported()
    handle = plain.get_init_handle()
    assert handle
    assert handle == plain.get_init_handle()
    with pytest.raises(to.StateError, match="expected a communicator made with enable_reconfigure=True"):
        plain.reconfigure(1, [handle])
    plain.finalize()
    comm = fake()
    mine = comm.get_init_handle()
    with pytest.raises(to.InvalidValueError, match="expected this rank's own handle"):
        comm.reconfigure(1, ["x"])
    with pytest.raises(to.InvalidValueError, match="expected each handle once, got 'x' twice"):
        comm.reconfigure(1, [mine, "x", "x"])
    with pytest.raises(to.InvalidValueError, match="expected what get_init_handle"):
        comm.reconfigure(1, [mine, ""])
    with pytest.raises(to.InvalidTypeError, match="expected a list or a set of strings for init_handles, got 5"):
        comm.reconfigure(1, 5)  # type: ignore[arg-type]
    with pytest.raises(to.InvalidTypeError, match="a list or a set of strings for init_handles"):
        comm.reconfigure(1, [mine, 1])  # type: ignore[list-item]
    with pytest.raises(to.InvalidValueError, match="expected a timeout > 0"):
        comm.reconfigure(1, [mine], timeout=timedelta(0))
    with pytest.raises(to.InvalidValueError, match="is_high_priority_stream"):
        comm.reconfigure(1, [mine], hints={"is_high_priority_stream": "perhaps"})
    comm.barrier(False)  # nothing was sent
    comm.reconfigure(1, ["a", "b", "c", mine])
    assert (comm.get_rank(), comm.get_size()) == (3, 4)
    out = torch.zeros(4)
    comm.all_gather_single(out, torch.ones(1), False)
    assert out.tolist() == [1, 1, 1, 1]
    comm.finalize()


def test_the_timeout_and_the_hints_can_be_set() -> None:
    comm = fake()
    comm.set_timeout(timedelta(seconds=3))
    assert comm.get_options().timeout == timedelta(seconds=3)
    with pytest.warns(UserWarning, match=r"unknown hints are ignored: \[key\]"):
        comm.set_hints({"is_high_priority_stream": "true", "key": "value"})
    assert comm.get_options().is_high_priority_stream
    with pytest.warns(UserWarning, match=r"unknown hints are ignored: \[other\]"):
        comm.set_hints({"other": "1"})
    assert dict(comm.get_options().hints) == {"key": "value", "other": "1"}
    with pytest.raises(to.InvalidValueError, match="set_timeout: expected a timeout of at least 1 ms"):
        comm.set_timeout(timedelta(0))
    with pytest.raises(to.InvalidTypeError, match=r"set_timeout: expected a datetime.timedelta for timeout"):
        comm.set_timeout(3)  # type: ignore[arg-type]
    with pytest.raises(to.Error, match="is_high_priority_stream"):
        comm.set_hints({"is_high_priority_stream": "perhaps"})
    comm.finalize()


def run_timeout(comm: to.TorchComm) -> None:
    meeting = comm.split([0, 1])
    assert meeting is not None
    comm.set_timeout(timedelta(seconds=0.5))
    if comm.get_rank() == 0:
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError, match=r"500 ms \(queued \d+\.\d s ago, running for \d+\.\d s\)"):
            comm.recv(torch.zeros(1), 1, async_op=False)
        assert time.monotonic() - begin < 0.5 + 30
    meeting.barrier(False)  # leaving earlier would be another error
    comm.abort()
    meeting.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_timeout_counts_from_the_next_operation(backend: str) -> None:
    run_ranks(run_timeout, 2, backend=backend)


def test_reconfigurable_communicators_do_not_end_the_process_unless_asked() -> None:
    options = to.CommOptions()
    assert options.abort_process_on_timeout_or_error
    options.enable_reconfigure = True
    assert not options.abort_process_on_timeout_or_error
    comm = fake(abort_process_on_timeout_or_error=True)
    assert comm.get_options().abort_process_on_timeout_or_error
    comm.finalize()
