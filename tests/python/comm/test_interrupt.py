"""Signals, such as Ctrl-C, while a call blocks: each in a process whose ranks' peer never calls."""

import textwrap

import pytest
from launcher import run_code

COMMON = """
import os, signal, tempfile, threading
from datetime import timedelta
import torch, torch_overlap as to

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs may have been started without

class Alarm(Exception):
    pass

def interrupted(call, error=KeyboardInterrupt, number=signal.SIGINT):
    sender = threading.Timer(0.5, os.kill, (os.getpid(), number))
    sender.start()
    try:
        call()
    except error as raised:
        return raised
    finally:
        sender.join()
    raise AssertionError(f"{call} came back")

def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

# Rank 0 of two, rank 1, which does nothing, if it is of this process, and what ends that.
def local(**options):
    store = torch.distributed.HashStore()
    make = lambda rank: to.new_comm("local", "cpu", "pair", store=store, rank=rank, size=2, **options)
    held = []
    thread = threading.Thread(target=lambda: held.append(make(1)))
    thread.start()
    comm = make(0)
    thread.join()
    return comm, held[0], held[0].abort

def gloo(**options):
    path = tempfile.mkdtemp() + "/store"
    make = lambda rank: to.new_comm(
        "gloo", "cpu", "pair", store=torch.distributed.FileStore(path, 2), rank=rank, size=2, **options)
    child = os.fork()
    if child == 0:
        idle = make(1)
        signal.pause()
    return make(0), None, lambda: end(child)
"""


def run(code: str) -> None:
    done = run_code(COMMON + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to the end\n"


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ctrl_c_ends_a_wait_and_what_was_waited_for_goes_on(backend: str) -> None:
    run(f"""
        comm, _, end_of_peer = {backend}()
        x = torch.ones(4)
        work = comm.all_reduce(x, to.ReduceOp.SUM, True)
        interrupted(work.wait)
        interrupted(lambda: work.wait(timedelta(seconds=600)))
        interrupted(lambda: comm.all_reduce(x, to.ReduceOp.SUM, False))
        interrupted(lambda: comm.barrier(False))
        interrupted(lambda: comm.recv(torch.ones(4), 1, False))
        interrupted(lambda: torch.ops.torch_overlap.all_reduce(x, "sum", "pair", 2))
        assert not work.is_completed() and not comm.is_aborted()
        comm.abort()
        try:
            work.wait()
        except to.StateError as error:
            assert "aborted" in str(error)
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


def test_ctrl_c_in_a_split_leaves_a_communicator_that_is_out_of_step() -> None:
    run("""
        comm, _, end_of_peer = local()
        interrupted(lambda: comm.split([0, 1]))
        assert comm.is_aborted()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


def test_ctrl_c_in_finalize_aborts() -> None:
    run("""
        comm, _, end_of_peer = local()
        work = comm.all_reduce(torch.ones(4), to.ReduceOp.SUM, True)
        interrupted(comm.finalize)
        try:
            work.wait()
        except to.StateError as error:
            assert "aborted" in str(error)
        assert comm.is_finalized()
        comm.abort()
        end_of_peer()
        print("to the end")
    """)


def test_ctrl_c_in_new_comm_leaves_the_name_free() -> None:
    run("""
        store = torch.distributed.HashStore()
        for backend in ["gloo", "local"]:
            make = lambda size: to.new_comm(backend, "cpu", "late", store=store, rank=0, size=size)
            interrupted(lambda: make(2))
            make(1).finalize()
        print("to the end")
    """)


def test_ctrl_c_in_new_comm_that_connects_to_a_store() -> None:
    run("""
        import socket
        with socket.socket() as port:  # bound, so that nobody else serves there
            port.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.getsockname()[1]))
            interrupted(lambda: to.new_comm("gloo", "cpu", rank=1, size=2))
        print("to the end", flush=True)
        os._exit(0)  # c10d's client tries on
    """)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ctrl_c_in_reconfigure_aborts_and_another_one_goes_on(backend: str) -> None:
    run(f"""
        comm = to.new_comm("{backend}", "cpu", "grows", store=torch.distributed.HashStore(), rank=0, size=1,
                           enable_reconfigure=True)
        mine = comm.get_init_handle()
        interrupted(lambda: comm.reconfigure(1, [mine, "nobody"]))
        assert comm.is_aborted()
        comm.reconfigure(2, [mine])
        x = torch.ones(4)
        comm.all_reduce(x, to.ReduceOp.SUM, False)
        assert (x == 1).all()
        comm.finalize()
        print("to the end")
    """)


def test_who_left_a_reconfigure_by_ctrl_c_is_not_taken_for_present() -> None:
    run("""
        comm, peer, end_of_peer = local(enable_reconfigure=True)
        handles = [one.get_init_handle() for one in (comm, peer)]
        interrupted(lambda: comm.reconfigure(1, handles))
        try:
            peer.reconfigure(1, handles, timeout=timedelta(seconds=1))
        except to.OperationTimeoutError as error:
            assert f"got none of [{handles[0]}]" in str(error), error
        else:
            raise AssertionError("it met nobody")
        end_of_peer()
        print("to the end")
    """)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ctrl_c_in_check_mismatch_aborts(backend: str) -> None:
    run(f"""
        comm, _, end_of_peer = {backend}(hints={{"check_mismatch": "true"}})
        interrupted(lambda: comm.all_reduce(torch.ones(4), to.ReduceOp.SUM, True))
        assert comm.is_aborted()
        comm.abort()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ctrl_c_in_a_rendezvous_of_windows(backend: str) -> None:
    """The ranks are out of step, as after a timeout."""
    run(f"""
        comm, _, end_of_peer = {backend}()
        x = to.symmetric_empty(4, torch.float32, comm)
        interrupted(lambda: comm.new_window(x))
        assert comm.is_aborted()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


def test_ctrl_c_in_tensor_deregister_leaves_the_tensor() -> None:
    """The other rank, which waits for this one, is notified; it was not interrupted itself."""
    run("""
        from concurrent.futures import ThreadPoolExecutor
        comm, peer, end_of_peer = local()
        make = lambda one: one.new_window(to.symmetric_empty(4, torch.float32, one))
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(make, peer)
            window = make(comm)
            other = other.result()
            signal_of_peer = window.wait_signal(1, True)
            left = pool.submit(other.tensor_deregister)
            interrupted(window.tensor_deregister)
            told = left.exception()
            assert isinstance(told, to.Error), repr(told)
            assert "rank 0 could not take part: interrupted by a signal" in str(told), told
            other.signal(0, False)
            signal_of_peer.wait()
            window.get_tensor().zero_()
            left = pool.submit(other.tensor_deregister)
            window.tensor_deregister()
            left.result()
        comm.abort()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_left_a_monitored_barrier_by_ctrl_c_has_not_come(rank: int) -> None:
    """Rank 0 decides for all, which are notified at once; it waits for the others itself."""
    run(f"""
        import torch.distributed as dist
        path = tempfile.mkdtemp() + "/store"
        child = os.fork()
        rank = {rank} if child else 1 - {rank}
        store = dist.FileStore(path, 2)
        dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=2)
        barrier = lambda seconds: dist.group.WORLD.monitored_barrier(timedelta(seconds=seconds))
        if child:
            interrupted(lambda: barrier(600))
            store.set("left", "so")
        else:
            store.wait(["left"])
            try:
                barrier(600 if rank == 1 else 1)
            except RuntimeError as error:
                assert "Rank {rank} failed to pass" in str(error), error
            else:
                raise AssertionError("all have come")
        barrier(600)
        dist.destroy_process_group()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print("to the end")
    """)


def test_a_wait_ends_with_what_the_handler_raises() -> None:
    run("""
        def alarm(number, frame):
            raise Alarm(number, "rang")
        signal.signal(signal.SIGUSR1, alarm)
        comm, _, end_of_peer = local()
        work = comm.all_reduce(torch.ones(4), to.ReduceOp.SUM, True)
        in_operator = lambda: torch.ops.torch_overlap.all_reduce(torch.ones(4), "sum", "pair", 2)
        for call in [work.wait, in_operator]:
            assert interrupted(call, Alarm, signal.SIGUSR1).args == (signal.SIGUSR1, "rang")
        comm.abort()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


def test_a_handler_may_abort_and_a_wait_goes_on_after_one_that_raises_nothing() -> None:
    run("""
        comm, _, end_of_peer = local()
        rung = []
        def alarm(number, frame):
            rung.append(number)
            if len(rung) == 2:
                comm.abort()
        signal.signal(signal.SIGUSR1, alarm)
        again = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGUSR1))
        again.start()
        work = comm.all_reduce(torch.ones(4), to.ReduceOp.SUM, True)
        raised = interrupted(work.wait, to.StateError, signal.SIGUSR1)
        assert "aborted" in str(raised) and len(rung) == 2
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)
