"""Forks, stores that die, wrong sizes, two jobs at the same time, hooks that raise, and resources that are not
leaked."""

import faulthandler
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import Launcher, run_code

import torch_overlap as to
from torch_overlap.testing import run_ranks

SUM = to.ReduceOp.SUM


def run_threads(bodies: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Runs the functions at once, each on a thread; returns their results, or raises the first error."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result(240) for future in [pool.submit(body, *args) for body, args in bodies]]


def run_jobs(body: Callable[..., None], backend: str) -> None:
    """Runs body(rank, size, store, backend) on two ranks, which make their own communicators: processes, or threads."""
    if backend == "local":
        store = dist.HashStore()
        run_threads([(body, (rank, 2, store, backend)) for rank in range(2)])
    else:
        run_ranks(body, 2, backend, comm=False, timeout=240)


# ---- fork


def fork() -> int:
    """Forks. The audit hook of filelock refuses while another thread takes a file lock."""
    for _ in range(100):
        try:
            return os.fork()
        except RuntimeError as error:
            if "filelock" not in str(error):
                raise
            time.sleep(0.01)
    return os.fork()


def in_fork(body: Callable[[], object]) -> tuple[int, str]:
    """Runs `body` in a fork of this process; returns its exit status, and its traceback if it raised or did not end."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        status = 1
        faulthandler.dump_traceback_later(120, exit=True, file=write)
        try:
            body()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def run_fork(comm: to.TorchComm) -> None:
    x = torch.ones(8)
    comm.all_reduce(x, SUM, async_op=True).wait()
    pending = comm.recv(torch.zeros(1), 1 - comm.get_rank(), async_op=True)
    window = comm.new_window(to.symmetric_empty(4, torch.float32, comm))
    config = to.CommOverlapConfig(to.CommOverlapType.RS, to.CommOverlapMethod.BULK, [8, 4], torch.float32, 2)
    buffer = to.create_comm_overlap_buffer(
        comm, to.CommOverlapType.RS, to.CommOverlapMethod.BULK, [8, 4], torch.float32
    )
    parents = [to.ops.all_reduce_async(torch.ones(3), comm) for _ in range(100)]  # some are still running at the fork
    refused = f"expected the process that made communicator '{comm.get_name()}', got a fork of it"

    def child() -> None:
        left = torch.ops.torch_overlap._pending_works()
        with pytest.raises(to.StateError, match=refused):
            comm.all_reduce(x, SUM, async_op=False)
        with pytest.raises(to.StateError, match=refused):
            comm.split([0])
        # The connection to the store, over which ranks meet for these, belongs to the parent.
        with pytest.raises(to.StateError, match=refused):
            window.tensor_deregister()
        with pytest.raises(to.StateError, match=refused):
            to.CommOverlapBase(comm, config)
        with pytest.raises(to.StateError, match=refused):
            to.create_comm_overlap_buffer(comm, to.CommOverlapType.RS, to.CommOverlapMethod.BULK, [8, 4], torch.float32)
        with pytest.raises(to.StateError, match="got a fork of it"):
            pending.wait()
        assert not pending.is_completed()
        with pytest.raises(to.StateError, match="got a fork of it"):
            to.ops.wait_tensor(parents[-1])
        with pytest.raises(to.StateError, match=refused):
            comm.finalize()
        comm.abort()
        assert comm.get_rank() in (0, 1)
        # The fork makes one of its own, also under the same name.
        with to.new_comm("local", "cpu", comm.get_name(), store=dist.HashStore(), rank=0, size=1) as mine:
            mine.all_reduce(x, SUM, async_op=False)
            for later in [to.ops.all_reduce_async(torch.ones(3), mine) for _ in range(200)]:
                assert to.ops.wait_tensor(later).tolist() == [1.0] * 3
            assert torch.ops.torch_overlap._pending_works() <= left  # works that the parent waits for remain

    status, text = in_fork(child)
    assert status == 0, text
    comm.send(torch.ones(1), 1 - comm.get_rank(), async_op=False)
    pending.wait()
    for later in parents:
        assert to.ops.wait_tensor(later).tolist() == [2.0] * 3
    to.destroy_comm_overlap_buffer(buffer)
    comm.all_reduce(x, SUM, async_op=True).wait()  # the parent's operations continue
    assert x.tolist() == [4.0] * 8
    window.put(torch.full((4,), 5.0), 1 - comm.get_rank(), 0, False, signal=True)
    window.wait_signal(1 - comm.get_rank(), False)
    assert window.get_tensor().tolist() == [5.0] * 4
    window.tensor_deregister()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_fork_is_refused_and_the_parent_goes_on(backend: str) -> None:
    run_ranks(run_fork, 2, backend=backend)


# ---- the store


def test_no_store_at_all_is_an_error_that_says_where() -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from datetime import timedelta
        import torch_overlap as to
        begin = time.monotonic()
        try:
            to.new_comm("gloo", "cpu", "x", timeout=timedelta(seconds=1))
        except to.Error as error:
            assert "expected a store at 127.0.0.1:1 within 1000 ms" in str(error), error
            assert time.monotonic() - begin < 1 + 30
            sys.exit(7)
        """
    )
    done = run_code(program, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 7, done.stderr


class Server:
    """A store in a process that can be killed."""

    def __init__(self) -> None:
        program = "import torch.distributed as d, time; s = d.TCPStore('127.0.0.1', 0, is_master=True, "
        program += "wait_for_workers=False); print(s.port, flush=True); time.sleep(600)"
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("seconds", [None, 0.0, 0.5])
@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_store_that_dies_while_ranks_meet_is_an_error_at_once(backend: str, seconds: float | None) -> None:
    """A call fails even before a rank has made its connection, which it would retry for the timeout of the store."""
    server = Server()
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    if seconds is None:
        server.kill()
    else:
        threading.Timer(seconds, server.kill).start()
    begin = time.monotonic()
    with pytest.raises(to.Error, match="new_comm 'met': expected the store to answer, got"):
        to.new_comm(backend, "cpu", "met", store=store, rank=0, size=2, timeout=timedelta(seconds=60))
    assert time.monotonic() - begin < 30


def run_without_store(rank: int, size: int, store: Any, backend: str) -> None:
    server = Server() if rank == 0 else None
    if server:
        store.set("port", str(server.port))
    own = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False, timeout=timedelta(seconds=60))
    patience = timedelta(seconds=60)
    comm = to.new_comm(
        backend, "cpu", "orphan", store=own, rank=rank, size=size, timeout=patience, enable_reconfigure=True
    )
    handles: list[Any] = [None] * size
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    comm.barrier(False)
    if server:
        server.kill()
    comm.barrier(False)
    x = torch.ones(4)
    comm.all_reduce(x, SUM, async_op=True).wait()  # existing connections stay usable
    assert x.tolist() == [2.0] * 4
    soon = timedelta(seconds=2)  # limit of waits for the store; the ranks wait for each other with the old limit
    comm.set_timeout(soon)
    begin = time.monotonic()
    with pytest.raises(to.Error, match="expected the store to answer, got"):
        comm.split([0, 1])
    with pytest.raises(to.Error, match=r"new_comm.*expected the store to answer, got"):
        to.new_comm(backend, "cpu", "late", store=own, rank=rank, size=size, timeout=soon)
    comm.all_reduce(x, SUM, async_op=False, timeout=patience)
    assert x.tolist() == [4.0] * 4
    with pytest.raises(to.Error, match=r"reconfigure: expected the store"):
        comm.reconfigure(1, handles)
    assert time.monotonic() - begin < 3 * 2 + 60 + 30
    comm.abort()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_store_that_dies_later_stops_only_what_needs_it(backend: str) -> None:
    run_jobs(run_without_store, backend)


def run_wrong_size(rank: int, size: int, store: Any, backend: str) -> None:
    said = size + rank
    other = 1 - rank
    for attempt in range(2):  # at the second, the other one has certainly published its size
        with pytest.raises(to.OperationTimeoutError, match=r"expected \d ranks within 4000 ms, got none of") as raised:
            to.new_comm(backend, "cpu", "odd", store=store, rank=rank, size=said, timeout=timedelta(seconds=4))
        store.set(f"expired/{attempt}/{rank}", "")
        store.wait([f"expired/{attempt}/{other}"])
    assert f"rank {other} came with size {size + other}" in str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ranks_that_disagree_on_the_size_are_told_so(backend: str) -> None:
    run_jobs(run_wrong_size, backend)


JOB = textwrap.dedent(
    """
    import sys
    from datetime import timedelta
    import torch, torch.distributed as dist, torch_overlap as to
    rank, port, value, turns = (int(word) for word in sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for turn in range(turns):
        comm = to.new_comm("gloo", "cpu", "same", store=store, rank=rank, size=2, timeout=timedelta(seconds=60))
        x = torch.full((100,), float(value))
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
        assert (x == 2 * value).all(), (turn, value, x)
        comm.finalize()
    """
)


def test_two_jobs_with_the_same_names_do_not_meet(launcher: Launcher) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ranks = [
        launcher.fork("-c", JOB, rank, store.port, 1000 * job + 1, 5)
        for job, store in enumerate(stores) for rank in range(2)
    ]  # fmt: skip
    codes = [process.wait(120) for process in ranks]
    assert codes == [0] * 4, "\n".join(process.printed() for process in ranks)


def test_two_jobs_of_threads_with_the_same_names_do_not_meet() -> None:
    def job(rank: int, size: int, store: Any, value: int) -> None:
        for _ in range(5):
            comm = to.new_comm("local", "cpu", "same", store=store, rank=rank, size=size, timeout=timedelta(seconds=60))
            assert to.get_comm("same") is comm
            x = torch.full((100,), float(value))
            comm.all_reduce(x, SUM, async_op=False)
            assert (x == 2 * value).all()
            comm.finalize()

    run_threads([(job, (rank, 2, store, 1000 * i + 1)) for i, store in enumerate((dist.HashStore(), dist.HashStore()))
                 for rank in range(2)])  # fmt: skip


# ---- hooks


def run_hooks(comm: to.TorchComm) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("not today")

    x = torch.ones(4)
    handle = comm.register_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not today"):
        comm.all_reduce(x, SUM, async_op=False)
    handle.remove()
    comm.all_reduce(x, SUM, async_op=False)  # nothing had been sent
    assert x.tolist() == [2.0] * 4
    handle = comm.register_post_hook(refuse)
    with pytest.raises(RuntimeError, match="not today"):
        comm.all_reduce(x, SUM, async_op=False)
    handle.remove()
    comm.register_abort_hook(refuse)
    comm.abort()
    assert comm.is_aborted()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_hooks_that_raise_leave_the_communicator_as_it_was(backend: str) -> None:
    run_ranks(run_hooks, 2, backend=backend)


# ---- resources left over


def resources() -> tuple[int, int, int, int]:
    """Returns the numbers of threads and descriptors, resident memory in MiB, and mappings of shared memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    shared = Path("/proc/self/maps").read_text().count("memfd:torch_overlap")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20, shared


def run_many(rank: int, size: int, store: Any, backend: str, count: int) -> tuple[Any, Any]:
    def once(turn: int) -> None:
        comm = to.new_comm(backend, "cpu", f"turn{turn % 7}", store=store, rank=rank, size=size,
                           timeout=timedelta(seconds=60))  # fmt: skip
        x = torch.full((5000,), float(rank + turn))
        works = [comm.all_reduce(x, SUM, async_op=True), comm.barrier(True)]
        if size > 1:
            works += [comm.send(x, 1 - rank, async_op=True), comm.recv(torch.zeros(5000), 1 - rank, async_op=True)]
        for work in works:
            work.wait()
        assert (x == size * turn + size * (size - 1) / 2).all()
        if turn % 4 == 0:
            child = comm.split(list(range(size)))
            assert child is not None
            window = child.new_window(to.symmetric_empty(100, torch.float32, child))
            window.put(torch.full((1,), float(turn)), 1 - rank, rank, False, signal=True)
            window.wait_signal(1 - rank, False)
            assert window.get_tensor()[1 - rank] == turn
            to.ops.all_gather_matmul(x.view(2, 2500), [torch.ones(3, 2500)], child, algorithm="p2p")
            child.finalize()
        comm.finalize() if turn % 2 == 0 else comm.abort()

    for turn in range(10):
        once(turn)
    before = resources()
    for turn in range(count):
        once(turn)
    deadline = time.monotonic() + 60  # threads that were asked to end may need a moment
    while resources()[0] > before[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    return before, resources()


def check_growth(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert after[0] <= before[0] + 2, f"threads: {before[0]} -> {after[0]}"
    assert after[1] <= before[1] + 4, f"descriptors: {before[1]} -> {after[1]}"
    assert after[2] <= before[2] + 64, f"memory in MiB: {before[2]} -> {after[2]}"
    assert after[3] <= before[3], f"mappings of shared memory: {before[3]} -> {after[3]}"


def test_200_gloo_communicators_leave_nothing_behind() -> None:
    for before, after in run_ranks(run_many, 2, "gloo", 200, comm=False, timeout=540):
        check_growth(before, after)


def test_200_local_communicators_leave_nothing_behind() -> None:
    store = dist.HashStore()
    for before, after in run_threads([(run_many, (rank, 2, store, "local", 200)) for rank in range(2)]):
        check_growth(before, after)


NO_THREAD = textwrap.dedent(
    """
    import resource, threading
    import torch, torch.distributed as dist, torch_overlap as to
    comm = to.new_comm("local", "cpu", "one", store=dist.HashStore(), rank=0, size=1)
    x, y = torch.ones(3), torch.ones(3)
    twice = to.ReduceOp.PREMUL_SUM(2.0)
    for _ in range(16):  # threads that ended have left their stacks to others
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limit[1]))  # no room for a stack
    try:
        comm.all_reduce(x, twice, async_op=True)
    except RuntimeError as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    comm.all_reduce(y, twice, async_op=True).wait()
    comm.finalize()
    print(x.tolist(), y.tolist())
    """
)


def test_an_operation_that_gets_no_thread_never_runs() -> None:
    done = run_code(NO_THREAD)
    assert done.returncode == 0, done.stderr
    refused, values = done.stdout.splitlines()
    assert refused.startswith("refused: ")
    assert values == "[1.0, 1.0, 1.0] [2.0, 2.0, 2.0]"
