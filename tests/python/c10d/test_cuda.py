"""The backend on GPUs: streams, futures, communicators that are made lazily, and groups that are split off."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torch_overlap.testing import gpu_of, run_ranks

pytestmark = pytest.mark.gpu(2)


def init(rank, size, store, backend="torch_overlap", **kwargs):
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), **kwargs)
    return gpu_of(rank)


def busy(device):
    """Keeps the current stream busy for a while, so that work that is not ordered after it runs too early."""
    torch.cuda._sleep(200_000_000)


def collectives(rank, size, store, eager, async_op):
    device = gpu_of(rank)
    init(rank, size, store, device_id=device if eager else None)

    def late(value, *shape):
        x = torch.full(shape, float("nan"), device=device)
        busy(device)
        return x.fill_(value)

    def run(function, *args, **kwargs):
        work = function(*args, async_op=async_op, **kwargs)
        if async_op:
            work.wait()

    x = late(rank + 1.0, 1000)
    run(dist.all_reduce, x)
    assert x.tolist() == [3.0] * 1000
    x = late(rank + 1.0, 1000)
    run(dist.all_reduce, x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 1000
    x = late(rank + 1.0, 1000)
    run(dist.broadcast, x, src=1)
    assert x.tolist() == [2.0] * 1000
    outputs = [torch.full((7,), float("nan"), device=device) for _ in range(size)]
    run(dist.all_gather, outputs, late(rank, 7))
    assert [t.tolist() for t in outputs] == [[float(r)] * 7 for r in range(size)]
    shared = torch.full((7,), float("nan"), device=device)
    run(dist.all_gather, [shared] * size, late(rank, 7))
    assert shared.tolist() == [size - 1.0] * 7
    output = torch.full((5,), float("nan"), device=device)
    run(dist.reduce_scatter_tensor, output, late(rank + 1.0, 5 * size))
    assert output.tolist() == [3.0] * 5
    output = torch.full((4 * size,), float("nan"), device=device)
    run(dist.all_to_all_single, output, late(rank, 4 * size))
    assert output.tolist() == [float(r) for r in range(size) for _ in range(4)]
    gathered = [torch.empty(3, device=device) for _ in range(size)] if rank == 0 else None
    run(dist.gather, late(rank, 3), gathered, dst=0)
    assert rank != 0 or [t.tolist() for t in gathered] == [[float(r)] * 3 for r in range(size)]
    # CPU tensors of the same group.
    x = torch.full((3,), rank + 1.0)
    run(dist.all_reduce, x)
    assert x.tolist() == [3.0] * 3


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "device_id"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["auto", "off"])  # custom collectives, or NCCL's
def test_collectives(eager, async_op, mode):
    env = {"TORCH_OVERLAP_CUSTOM_COLLECTIVES": mode}
    run_ranks(collectives, 2, eager, async_op, comm=False, timeout=120, env=env)


def messages(rank, size, store, eager):
    device = gpu_of(rank)
    init(rank, size, store, device_id=device if eager else None)
    x = torch.full((9,), float(rank), device=device)
    y = torch.full((9,), float("nan"), device=device)
    # The first operation of the group, in which not all ranks take part.
    if rank == 0:
        dist.send(x + 5, 1)
    elif rank == 1:
        dist.recv(y, 0)
        assert y.tolist() == [5.0] * 9
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    )
    assert len(works) == 1
    works[0].wait()
    assert y.tolist() == [float((rank - 1) % size)] * 9


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "device_id"])
def test_messages(eager):
    run_ranks(messages, 2, eager, comm=False, timeout=120)


def ring_first(rank, size, store, eager):
    device = gpu_of(rank)
    init(rank, size, store, device_id=device if eager else None)
    right, left = (rank + 1) % size, (rank - 1) % size
    for numel in (1000, 1 << 24):  # more than NCCL buffers
        x, y = torch.full((numel,), float(rank), device=device), torch.zeros(numel, device=device)
        works = [dist.isend(x, right), dist.irecv(y, left)]
        for work in works:
            work.wait()
        assert (y == left).all()
    # Tags match in any order, also in a batch.
    pairs = {tag: torch.zeros(5, device=device) for tag in (1, 2)}
    order = [1, 2] if rank == 0 else [2, 1]
    works = [dist.isend(torch.full((5,), 10.0 * rank + tag, device=device), right, tag=tag) for tag in order]
    works += [dist.irecv(pairs[tag], left, tag=tag) for tag in reversed(order)]
    for work in works:
        work.wait()
    assert all((y == 10.0 * left + tag).all() for tag, y in pairs.items())
    ops = [dist.P2POp(dist.isend, torch.full((5,), 20.0 * rank + tag, device=device), right, tag=tag) for tag in order]
    ops += [dist.P2POp(dist.irecv, pairs[tag], left, tag=tag) for tag in order]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert all((y == 20.0 * left + tag).all() for tag, y in pairs.items())
    with pytest.raises(RuntimeError, match="NCCL cannot receive from any rank, pass src"):
        dist.recv(x)
    dist.destroy_process_group()


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "device_id"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_a_ring_of_sends_before_any_receive(size, eager):
    run_ranks(ring_first, size, eager, comm=False, timeout=120)


def pending(rank, size, store):
    device = gpu_of(rank)
    init(rank, size, store)
    peers = [r for r in range(size) if r != rank]
    for peer in peers:
        one, other = (dist.isend, dist.irecv) if rank < peer else (dist.irecv, dist.isend)
        one(torch.ones(4, device=device), peer).wait()
        other(torch.ones(4, device=device), peer).wait()
    torch.cuda.synchronize()
    works = [dist.irecv(torch.empty(4, device=device), peer) for peer in peers]
    begin = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    took = time.monotonic() - begin
    torch.cuda.synchronize()
    del works
    return took


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_abort_with_pending_receives_of_several_pairs(size):
    for took in run_ranks(pending, size, comm=False, timeout=120):
        assert took < 8


def works(rank, size, store):
    device = init(rank, size, store)
    x = torch.full((1 << 20,), rank + 1.0, device=device)
    busy(device)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    # On another stream: only the future orders it after the operation.
    with torch.cuda.stream(torch.cuda.Stream()):
        assert future.wait()[0].eq(3.0).all()
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.is_success()

    busy(device)
    marker = torch.cuda.Event()
    x.add_(1)
    marker.record()
    dist.barrier()
    assert marker.query()  # the barrier blocked the host until all earlier work was done


def test_futures_and_host_blocking_barrier():
    run_ranks(works, 2, comm=False, timeout=120)


def splitting(rank, size, store):
    device = gpu_of(rank)
    init(rank, size, store, device_id=device)
    alone = dist.split_group(split_ranks=[[0], [1]])
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x, group=alone)
    assert x.tolist() == [rank + 1.0] * 3
    whole = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(x, group=whole)
    assert x.tolist() == [3.0] * 3
    one = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(x, group=one)
    mesh = dist.init_device_mesh("cuda", (1, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(x, group=mesh.get_group("b"))
    assert x.tolist() == [6.0] * 3


def test_split_group_new_group_and_mesh():
    run_ranks(splitting, 2, comm=False, timeout=120)
