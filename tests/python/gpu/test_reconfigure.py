"""reconfigure over NCCL: by ncclCommShrink if nothing has failed, from scratch otherwise, and with graphs."""

import gc
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


def handles_of(comm):
    handles = [None] * comm.get_size()
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    return handles


def check_sum(comm, members):
    """Checks that the members, known by their ranks in the test's communicator, are present in this order."""
    assert comm.get_size() == len(members)
    for async_op in (False, True):
        x = torch.full((1 << 16,), float(members[comm.get_rank()] + 1), device="cuda")
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=async_op).wait()
        assert (x == sum(members) + len(members)).all()
    out = torch.full((len(members),), -1.0, device="cuda")
    comm.all_gather_single(out, torch.tensor([float(members[comm.get_rank()])], device="cuda"), async_op=False)
    assert out.tolist() == members


def test_the_same_members_in_another_order(comm, make_comm):
    again = make_comm("again", enable_reconfigure=True)
    handles = handles_of(again)
    members = list(reversed(range(comm.get_size())))
    again.reconfigure(1, [handles[r] for r in members])
    check_sum(again, members)
    again.reconfigure(2, set(handles))
    check_sum(again, members)
    again.finalize()


def test_a_healthy_communicator_shrinks_and_grows_again(comm, make_comm):
    rank, size = comm.get_rank(), comm.get_size()
    some = make_comm("some", enable_reconfigure=True)
    handles = handles_of(some)
    check_sum(some, list(range(size)))
    if rank != size - 1:
        begin = time.monotonic()
        some.reconfigure(1, handles[:-1])
        print(f"shrunk in {time.monotonic() - begin:.3f} s")
        check_sum(some, list(range(size - 1)))
    comm.barrier(async_op=True).wait_blocking()
    some.reconfigure(2, handles)
    check_sum(some, list(range(size)))
    some.finalize()


def test_after_a_timeout_the_survivors_go_on(comm, make_comm):
    rank, size = comm.get_rank(), comm.get_size()
    hit = make_comm("hit", enable_reconfigure=True)
    handles = handles_of(hit)
    x = torch.ones(1 << 16, device="cuda")
    hit.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    hit.set_timeout(timedelta(seconds=2))
    if rank != size - 1:
        works = [hit.all_reduce(x, to.ReduceOp.SUM, async_op=True) for _ in range(20)]  # some are still enqueued
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError, match=r"2000 ms.*queued \d+\.\d s ago, running for \d+\.\d s"):
            works[-1].wait_blocking()
        assert time.monotonic() - begin < 3
        torch.cuda.synchronize()  # the device is idle
        hit.reconfigure(1, handles[:-1], timeout=timedelta(seconds=30))
        assert not hit.is_aborted()
        check_sum(hit, list(range(size - 1)))
        for work in works:
            assert work.status() in (to.WorkStatus.TIMEDOUT, to.WorkStatus.COMPLETED)
        hit.finalize()
    else:
        hit.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_works_under_way_end_with_an_error_and_the_device_is_free(comm, make_comm):
    rank = comm.get_rank()
    busy = make_comm("busy", enable_reconfigure=True)
    handles = handles_of(busy)
    x = torch.ones(1 << 16, device="cuda")
    busy.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    work = busy.all_reduce(x, to.ReduceOp.SUM, async_op=True) if rank == 0 else None
    busy.reconfigure(1, handles)
    if work is not None:
        with pytest.raises(to.StateError, match="was reconfigured"):
            work.wait_blocking()
    torch.cuda.synchronize()
    check_sum(busy, list(range(comm.get_size())))
    busy.finalize()


def test_graphs_of_the_old_members_are_refused(comm, make_comm):
    graphed = make_comm("graphed", enable_reconfigure=True)
    handles = handles_of(graphed)
    x = torch.ones(1 << 10, device="cuda")
    graphed.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    with pytest.raises(to.StateError, match="expected no CUDA graph that captured 'graphed', got some on the member"):
        graphed.reconfigure(1, handles, timeout=timedelta(seconds=30))
    graph.reset()
    del graph
    gc.collect()
    torch.cuda.synchronize()
    graphed.reconfigure(2, handles, timeout=timedelta(seconds=30))
    check_sum(graphed, list(range(comm.get_size())))
    graphed.finalize()


def test_mismatches_are_found_before_anything_is_launched(comm, make_comm):
    rank = comm.get_rank()
    checked = make_comm("checked", hints={"check_mismatch": "true"})
    queued = torch.ones(1 << 22, device="cuda")
    works = [checked.all_reduce(queued, to.ReduceOp.MAX, async_op=True) for _ in range(10)]
    with pytest.raises(to.InvalidValueError, match="expected the same operation on all ranks of 'checked'"):
        checked.all_reduce(torch.ones(4 + rank, device="cuda"), to.ReduceOp.SUM, async_op=True)
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(8, device="cuda")
    checked.all_reduce(x, to.ReduceOp.MAX, async_op=False)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # it checks when it captures
        with pytest.raises(to.InvalidValueError, match="expected the same operation"):
            checked.broadcast(x, rank % 2, async_op=False)
        checked.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    x.fill_(rank + 1.0)
    graph.replay()
    assert (x == sum(range(1, comm.get_size() + 1))).all()
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    assert (queued == 1).all()
    del graph
    checked.finalize()
