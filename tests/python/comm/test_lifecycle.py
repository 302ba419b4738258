"""Names, the registry, finalize, abort, copies, and the end of the process."""

import copy
import re
import subprocess
import textwrap
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launcher import run_code

import torch_overlap as to
from torch_overlap import InvalidValueError, OperationTimeoutError, ReduceOp, StateError, TorchComm
from torch_overlap.testing import run_ranks


def fake(name: str | None = None) -> TorchComm:
    return to.new_comm("fake", "cpu", name, rank=1, size=3)


def run_facts(comm: TorchComm, backend: str, size: int) -> int:
    assert comm.get_size() == size
    assert comm.get_backend() == backend
    assert comm.get_device() == torch.device("cpu") or comm.get_device().index is not None
    assert re.fullmatch(r"(torch )?\d+(\.\d+)*", comm.get_backend_version())
    assert comm.get_ranks_in_world() == list(range(size))
    assert comm.get_name() in to.comm_names()
    assert to.get_comm(comm.get_name()) is comm
    assert not comm.is_aborted()
    assert not comm.is_finalized()
    assert backend in repr(comm)
    return comm.get_rank()


def test_a_communicator_knows_what_it_is(any_backend: str, any_size: int, device: str) -> None:
    ranks = run_ranks(run_facts, any_size, any_backend, any_size, backend=any_backend, device=device)
    assert ranks == list(range(any_size))


def run_after_finalize(comm: TorchComm) -> None:
    x = torch.ones(1, device=comm.get_device())
    name = comm.get_name()
    comm.finalize()
    assert comm.is_finalized()
    with pytest.raises(StateError, match=f"all_reduce: expected a live communicator, got '{name}', .*finalized"):
        comm.all_reduce(x, ReduceOp.SUM, False)
    with pytest.raises(StateError, match="split"):
        comm.split([0])
    with pytest.raises(StateError, match="already finalized"):
        comm.finalize()
    if comm.get_backend() != "local":  # there the name belongs to the other ranks too
        assert name not in to.comm_names()
    with pytest.raises(StateError, match=f"get_comm: expected a live communicator, got '{name}', .*finalized"):
        to.get_comm(name)
    with pytest.raises(StateError, match=f"'{name}', which was finalized"):
        torch.ops.torch_overlap.all_reduce(x, "sum", name, comm.get_size())
    assert comm.get_rank() in range(comm.get_size())


def test_after_finalize_everything_is_refused(any_backend: str, any_size: int, device: str) -> None:
    run_ranks(run_after_finalize, any_size, backend=any_backend, device=device)


def test_a_finalized_name_may_be_used_again_and_is_known_for_a_while() -> None:
    fake("again").finalize()
    with pytest.raises(StateError, match="got 'again', which was finalized"):
        to.get_comm("again")
    with fake("again") as comm:
        assert to.get_comm("again") is comm
    for _ in range(1000):
        with pytest.raises(StateError, match="got 'again', which was finalized"):
            to.get_comm("again")
        fake().finalize()
    with pytest.raises(InvalidValueError, match="expected the name of a live communicator, got 'again'"):
        to.get_comm("again")


def run_after_abort(comm: TorchComm) -> None:
    comm.abort()
    assert comm.is_aborted()
    with pytest.raises(StateError, match=r"barrier: expected a live communicator, .*aborted"):
        comm.barrier(False)
    comm.abort()
    comm.finalize()  # releases the rest


def test_after_abort_everything_is_refused(any_backend: str, any_size: int, device: str) -> None:
    run_ranks(run_after_abort, any_size, backend=any_backend, device=device)


def run_abort_frees_waiters(comm: TorchComm) -> None:
    if comm.get_rank() == 0:
        with pytest.raises(to.Error):
            comm.recv(torch.ones(1), 1, False).wait()
    comm.abort()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_an_abort_of_one_rank_frees_those_that_wait_for_it(which: str) -> None:
    run_ranks(run_abort_frees_waiters, 2, backend=which)


def run_finalize_runs_out(comm: TorchComm) -> None:
    meeting = comm.split([0, 1])
    assert meeting is not None
    if comm.get_rank() == 0:
        name = comm.get_name()
        work = comm.recv(torch.ones(1), 1, True, timeout=timedelta(seconds=600))
        comm.set_timeout(timedelta(seconds=1))
        begin = time.monotonic()
        with pytest.raises(to.Error, match=f"finalize of '{name}': operations did not end in 1000 ms"):
            comm.finalize()
        assert 1 <= time.monotonic() - begin < 1 + 5  # the library's guarantee on two loaded cores
        assert comm.is_finalized()
        with pytest.raises(to.Error):
            work.wait_blocking()
        assert work.is_completed()
    meeting.barrier(False)  # leaving earlier would end the operation
    if comm.get_rank() == 1:
        comm.abort()
    meeting.finalize()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_a_finalize_that_waits_for_a_peer_ends_in_time(which: str) -> None:
    run_ranks(run_finalize_runs_out, 2, backend=which, timeout=120)


def run_name_after_a_failure(rank: int, size: int, store: dist.Store, how: str) -> None:
    def make() -> TorchComm:
        return to.new_comm("gloo", "cpu", "again", store=store, rank=rank, size=size, timeout=timedelta(seconds=60),
                           abort_process_on_timeout_or_error=False)  # fmt: skip

    comm = make()
    if how == "aborted" or rank == 1:
        if rank == 1:
            store.wait([how])
        comm.abort()
        comm.finalize()
    else:
        seconds = timedelta(seconds=0.3)
        if how == "timed out":
            with pytest.raises(to.OperationTimeoutError):
                comm.recv(torch.ones(1), 1, False, timeout=seconds)
        else:
            comm.recv(torch.ones(1), 1, True)
            comm.set_timeout(seconds)
        with pytest.raises(to.Error, match="finalize"):
            comm.finalize()
    if rank == 0:
        store.set(how, "")
    with make() as again:
        x = torch.ones(3)
        again.all_reduce(x, to.ReduceOp.SUM, async_op=False)
        assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("how", ["aborted", "timed out", "finalize timed out"])
def test_a_name_is_free_after_a_failure_and_finalize(how: str) -> None:
    run_ranks(run_name_after_a_failure, 2, how, comm=False)


def test_one_name_is_one_live_communicator() -> None:
    first = fake("only")
    with pytest.raises(InvalidValueError, match="expected a name that no live communicator has, got 'only'"):
        fake("only")
    first.finalize()
    fake("only").finalize()


def test_names_are_made_up_and_differ() -> None:
    comms = [fake() for _ in range(3)]
    assert len({comm.get_name() for comm in comms}) == 3
    for comm in comms:
        comm.finalize()


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="expected a name that is not empty"):
        fake("")


def run_same_name(rank: int, size: int, store: object) -> None:
    for turn in range(3):
        comm = to.new_comm("gloo", "cpu", "again", store=store, rank=rank, size=size)  # type: ignore[arg-type]
        x = torch.tensor([turn + rank])
        comm.all_reduce(x, ReduceOp.SUM, False).wait()
        assert x.item() == size * turn + size * (size - 1) // 2
        comm.finalize()


def test_a_name_may_be_used_again_on_the_same_store() -> None:
    run_ranks(run_same_name, 3, comm=False)


def run_several(rank: int, size: int, store: object) -> None:
    comms = [to.new_comm("gloo", "cpu", store=store, rank=rank, size=size) for _ in range(3)]  # type: ignore[arg-type]
    tensors = [torch.tensor([10 * i + rank]) for i in range(3)]
    works = [comm.all_reduce(x, ReduceOp.SUM, True) for comm, x in zip(comms, tensors, strict=True)]
    for work in reversed(works):
        work.wait()
    assert [x.item() for x in tensors] == [10 * i * size + size * (size - 1) // 2 for i in range(3)]
    for comm in comms:
        comm.finalize()


def test_several_communicators_side_by_side() -> None:
    run_ranks(run_several, 2, comm=False)


def run_different_requests(rank: int, size: int, store: object) -> None:
    from datetime import timedelta

    with pytest.raises(InvalidValueError, match="expected the same request for 'mixed' on all ranks"):
        to.new_comm(
            "gloo" if rank == 0 else "fake2", "cpu", "mixed", store=store, rank=rank, size=size,  # type: ignore[arg-type]
            timeout=timedelta(seconds=60),
        )  # fmt: skip


class Other(to.TorchCommBackend):
    pass


def run_registered(rank: int, size: int, store: object) -> None:
    to.register_backend("fake2", Other)
    run_different_requests(rank, size, store)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    run_ranks(run_registered, 2, comm=False)


def run_missing_rank(rank: int, size: int, store: object) -> None:
    from datetime import timedelta

    if rank == 0:  # long enough for a slow lookup of the store's name
        with pytest.raises(OperationTimeoutError, match=r"expected 2 ranks within 12000 ms, got none of ranks \[1\]"):
            to.new_comm("gloo", "cpu", "lonely", store=store, rank=0, size=2, timeout=timedelta(seconds=12))  # type: ignore[arg-type]


def test_a_rank_that_does_not_come_is_named() -> None:
    run_ranks(run_missing_rank, 2, comm=False)


def test_copies_are_the_same_communicator() -> None:
    with fake() as comm:
        assert copy.copy(comm) is comm
        memo: dict[int, object] = {}
        assert copy.deepcopy(comm, memo) is comm
        assert memo[id(comm)] is comm
        assert copy.deepcopy({"comm": [comm]})["comm"][0] is comm


def test_a_with_block_finalizes_or_aborts() -> None:
    with fake() as comm:
        pass
    assert comm.is_finalized()
    with pytest.raises(KeyError), fake() as comm:
        raise KeyError
    assert comm.is_aborted()
    with fake() as comm:
        comm.finalize()


@pytest.mark.parametrize(
    ("given", "message"), [((1, None), "rank and size together"), ((3, 3), "rank in"), ((-1, 2), "rank in")]
)
def test_rank_and_size_are_checked(given: tuple[int, int | None], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        to.new_comm("fake", "cpu", rank=given[0], size=given[1])


def test_no_launcher_and_no_store_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHCOMM_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidValueError, match="torchrun"):
        to.new_comm("gloo", "cpu")


@pytest.mark.parametrize("by_launcher", [True, False])
def test_no_store_and_no_address_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, by_launcher: bool) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHCOMM_RANK", "0")
    monkeypatch.setenv("TORCHCOMM_SIZE", "1")
    given = {} if by_launcher else {"rank": 0, "size": 1}
    expected = (
        "^new_comm: expected a store, or MASTER_ADDR in the environment, or a SLURM node list, got none; "
        "start the script with torchrun or pass store=$"
    )
    with pytest.raises(InvalidValueError, match=expected):
        to.new_comm("gloo", "cpu", "nowhere", **given)
    assert "nowhere" not in to.comm_names()


def test_a_device_that_the_backend_lacks_is_refused() -> None:
    with pytest.raises(to.InvalidTypeError, match="expected a device of backend 'local'"):
        to.new_comm("local", "meta", rank=0, size=1)


def test_the_destructor_warns_and_aborts(capfd: pytest.CaptureFixture[str]) -> None:
    comm = fake("forgotten")
    del comm
    # Any thread may be the last holder, so the warning goes to stderr.
    assert "'forgotten' is destroyed without finalize" in capfd.readouterr().err
    assert "forgotten" not in to.comm_names()


def run_python(*parts: str) -> "subprocess.CompletedProcess[str]":
    return run_code("".join(textwrap.dedent(part) for part in parts))


def test_the_interpreter_ends_although_a_communicator_lives() -> None:
    done = run_python("""
        import torch, torch_overlap as to
        store = torch.distributed.HashStore()
        comm = to.new_comm("gloo", "cpu", "left", store=store, rank=0, size=1)
        comm.register_abort_hook(lambda: print("hook ran"))
        work = comm.all_reduce(torch.ones(1000), to.ReduceOp.SUM, async_op=True)
    """)
    assert done.returncode == 0, done.stderr
    assert "hook ran" in done.stdout
    assert "got live communicators ['left']" in done.stderr


# leave(comm) starts an operation that still runs while the interpreter ends; it takes some time.
LEAVE = """
import os, sys, time, torch, torch_overlap as to

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

slow = Slow()

def leave(comm):
    comm.all_reduce(torch.ones(40_000_000, dtype=torch.complex64), to.ReduceOp.PREMUL_SUM(0.5), async_op=True)
"""


def test_no_operation_outlives_the_interpreter() -> None:
    """An operation that ends together with the interpreter would drop its tensors when Python's lock cannot be
    acquired."""
    done = run_python(
        LEAVE,
        """
        store = torch.distributed.HashStore()
        comm = to.new_comm("gloo", "cpu", "left", store=store, rank=0, size=1)
        leave(comm)
    """,
    )
    assert done.returncode == 0, done.stderr


def test_no_operation_of_a_fork_outlives_its_interpreter() -> None:
    done = run_python(
        LEAVE,
        """
        def communicator(name):
            return to.new_comm("gloo", "cpu", name, store=torch.distributed.HashStore(), rank=0, size=1)
        first = communicator("parent's")
        first.all_reduce(torch.ones(4), to.ReduceOp.SUM, async_op=True).wait()
        first.finalize()
        child = os.fork()
        if child != 0:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        comm = communicator("child's")
        leave(comm)
    """,
    )
    assert done.returncode == 0, done.stderr


def test_an_operation_that_outlasts_the_interpreter_leaves_its_tensors() -> None:
    """Its thread is delayed until the interpreter ends, and is about to drop a tensor that Python has seen."""
    done = run_python("""
        import atexit, ctypes, os, signal, time
        libc = ctypes.CDLL(None)

        def threads():
            return set(map(int, os.listdir("/proc/self/task")))

        # The last to run; until then, and until the interpreter ends, the main thread has Python's lock.
        atexit.register(ctypes.PyDLL(None).usleep, 2_000_000)
        import torch, torch_overlap as to
        comm = to.new_comm("local", "cpu", "left", hints={"local::delay": "0@0:60000"},
                           store=torch.distributed.HashStore(), rank=0, size=1)
        before = threads()
        comm.all_reduce(torch.ones(1000), to.ReduceOp.SUM, async_op=True)
        (thread,) = threads() - before
        # A handler that sleeps for as many seconds as its signal's number: three.
        libc.signal(signal.SIGQUIT, ctypes.cast(libc.sleep, ctypes.c_void_p))
        libc.tgkill(os.getpid(), thread, signal.SIGQUIT)
    """)
    assert done.returncode == 0, done.stderr
    assert "got live communicators ['left']" in done.stderr


def test_all_communicators_are_aborted_at_the_end_although_one_cannot_be() -> None:
    done = run_python("""
        import torch, torch_overlap as to
        class Stubborn(to.TorchCommBackend):
            def abort(self):
                raise ValueError("not today")
        to.register_backend("stubborn", Stubborn)
        def communicator(backend, name):
            return to.new_comm(backend, "cpu", name, store=torch.distributed.HashStore(), rank=0, size=1)
        left = [communicator("stubborn", "a"), communicator("gloo", "b"), communicator("stubborn", "c")]
        left[1].register_abort_hook(lambda: print("hook ran"))
    """)
    assert done.returncode == 0, done.stderr
    assert "hook ran" in done.stdout
    assert "got live communicators ['a', 'b', 'c']" in done.stderr
    assert "communicator 'a': abort failed" in done.stderr


def test_a_finalized_communicator_leaves_no_trace_at_the_end() -> None:
    done = run_python("""
        import warnings
        warnings.filterwarnings("ignore", "torch_overlap: expected torch")  # of one that was not tested
        import torch, torch_overlap as to
        store = torch.distributed.HashStore()
        comm = to.new_comm("gloo", "cpu", store=store, rank=0, size=1)
        comm.register_post_hook(lambda *_: comm)
        comm.all_reduce(torch.ones(1000), to.ReduceOp.SUM, async_op=True).wait()
        comm.finalize()
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
