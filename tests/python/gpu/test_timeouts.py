"""Timeouts, aborts and the state of a communicator after them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


def test_a_missing_peer_is_a_timeout_error_everywhere(comm, make_comm):
    lonely = make_comm("lonely", timeout=timedelta(seconds=3))
    x = torch.ones(1 << 16, device="cuda")
    lonely.all_reduce(x, to.ReduceOp.SUM, async_op=False)  # connects
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        begin = time.monotonic()
        work = lonely.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        with pytest.raises(to.OperationTimeoutError, match=r"all_reduce #\d+ on 'lonely'.*3000 ms.*queued .* ago"):
            work.wait_blocking()
        assert time.monotonic() - begin < 10
        assert work.is_completed()
        assert work.status() == to.WorkStatus.TIMEDOUT
        assert isinstance(work.exception(), to.OperationTimeoutError)
        with pytest.raises(to.OperationTimeoutError):
            work.wait()
        with pytest.raises(to.OperationTimeoutError):
            lonely.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        assert lonely.is_aborted()
        torch.cuda.synchronize()  # the kernel has ended
        with pytest.raises(to.OperationTimeoutError):
            lonely.finalize()
    else:
        time.sleep(6)
        lonely.abort()
    comm.barrier(async_op=True).wait_blocking()  # other communicators continue


def test_the_timeout_of_one_operation(comm, make_comm):
    short = make_comm("short")
    x = torch.ones(8, device="cuda")
    short.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    if comm.get_rank() == 0:
        work = short.all_reduce(x, to.ReduceOp.SUM, async_op=True, timeout=timedelta(seconds=1))
        with pytest.raises(to.OperationTimeoutError, match="1000 ms"):
            work.wait_blocking()
    else:
        time.sleep(3)
    short.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_a_peer_that_never_comes_to_the_first_operation(comm, make_comm):
    """The host itself blocks in NCCL, which connects to its peers on first use."""
    first = make_comm("first", timeout=timedelta(seconds=3))
    x = torch.ones(8, device="cuda")
    if comm.get_rank() == 0:
        with pytest.raises(to.OperationTimeoutError):
            first.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait_blocking()
    else:
        time.sleep(6)
        first.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_work_that_is_queued_for_long_is_not_late(make_comm):
    patient = make_comm("patient", timeout=timedelta(seconds=1))
    x = torch.ones(8, device="cuda")
    torch.cuda._sleep(6_000_000_000)  # three seconds
    patient.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait()
    torch.cuda.synchronize()
    assert (x == patient.get_size()).all()
    patient.finalize()


def test_abort_ends_a_hang_and_the_process_lives(comm, make_comm):
    hung = make_comm("hung")
    called = []
    hung.register_abort_hook(lambda: called.append(True))
    x = torch.ones(1 << 20, device="cuda")
    hung.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        work = hung.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        time.sleep(0.5)
        assert not work.is_completed()
    hung.abort()
    torch.cuda.synchronize()
    assert called == [True]
    with pytest.raises(to.StateError):
        hung.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    comm.barrier(async_op=True).wait_blocking()


def test_finalize_waits_for_what_is_under_way(make_comm):
    ending = make_comm("ending")
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(400_000_000)
    work = ending.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    ending.finalize()
    assert work.is_completed()
    work.wait()
    assert (x == int(os.environ["WORLD_SIZE"])).all()
    with pytest.raises(to.StateError):
        ending.finalize()


def test_a_finalize_that_waits_for_a_peer_ends_in_time(comm, make_comm):
    stuck = make_comm("stuck")
    x = torch.ones(1 << 16, device="cuda")
    stuck.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        work = stuck.all_reduce(x, to.ReduceOp.SUM, async_op=True, timeout=timedelta(seconds=600))
        stuck.set_timeout(timedelta(seconds=2))
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError, match=r"finalize on 'stuck': .* within 2000 ms"):
            stuck.finalize()
        assert 2 <= time.monotonic() - begin < 2 + 1  # the library's guarantee on GPUs
        with pytest.raises(to.Error):
            work.wait_blocking()
        torch.cuda.synchronize()  # the kernel has ended
    comm.barrier(async_op=True).wait_blocking()
    if comm.get_rank() != 0:
        stuck.abort()


PROGRAM = textwrap.dedent(
    """
    import sys, time
    from datetime import timedelta
    import torch, torch_overlap as to
    store = torch.distributed.FileStore(sys.argv[1], int(sys.argv[3]))
    rank = int(sys.argv[2])
    comm = to.new_comm("nccl", torch.device("cuda"), "dies", store=store, timeout=timedelta(seconds=3))
    comm.register_abort_hook(lambda: print("the hook ran", file=sys.stderr, flush=True))
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    if rank == 0:
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    time.sleep(8)
    comm.abort()
    """
)


def test_by_default_a_timeout_ends_the_process(comm, tmp_path_factory):
    rank = comm.get_rank()
    name = [str(tmp_path_factory.mktemp("store") / "file")] if rank == 0 else [None]
    to.objcol.broadcast_object_list(comm, name, 0)
    child = subprocess.run([sys.executable, "-c", PROGRAM, name[0], str(rank), str(comm.get_size())],
                           capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    if rank == 0:
        assert child.returncode == -signal.SIGABRT, child.stderr
        assert "the hook ran" in child.stderr
        assert "Aborting process due to timeout" in child.stderr
    else:
        assert child.returncode == 0, child.stderr
    comm.barrier(async_op=True).wait_blocking()
