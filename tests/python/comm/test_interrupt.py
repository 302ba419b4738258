"""Signals, such as Ctrl-C, while a call blocks: each in a process whose ranks' peer never comes."""

import subprocess
import sys
import textwrap

import pytest

COMMON = """
import os, signal, tempfile, threading
from datetime import timedelta
import torch, torch_overlap as to

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

# Rank 0 of two; rank 1 does nothing.
def local():
    store = torch.distributed.HashStore()
    make = lambda rank: to.new_comm("local", "cpu", "pair", store=store, rank=rank, size=2)
    held = []
    thread = threading.Thread(target=lambda: held.append(make(1)))
    thread.start()
    comm = make(0)
    thread.join()
    return comm, lambda: held.pop().abort()

def gloo():
    path = tempfile.mkdtemp() + "/store"
    make = lambda rank: to.new_comm(
        "gloo", "cpu", "pair", store=torch.distributed.FileStore(path, 2), rank=rank, size=2)
    child = os.fork()
    if child == 0:
        idle = make(1)
        signal.pause()
    return make(0), lambda: end(child)
"""


def run(code: str) -> None:
    program = COMMON + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to the end\n"


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ctrl_c_ends_a_wait_and_what_was_waited_for_goes_on(backend: str) -> None:
    run(f"""
        comm, end_of_peer = {backend}()
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
        comm, end_of_peer = local()
        interrupted(lambda: comm.split([0, 1]))
        assert comm.is_aborted()
        comm.finalize()
        end_of_peer()
        print("to the end")
    """)


def test_ctrl_c_in_finalize_aborts() -> None:
    run("""
        comm, end_of_peer = local()
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


def test_a_wait_ends_with_what_the_handler_raises() -> None:
    run("""
        def alarm(number, frame):
            raise Alarm(number, "rang")
        signal.signal(signal.SIGUSR1, alarm)
        comm, end_of_peer = local()
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
        comm, end_of_peer = local()
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
