"""Callbacks of futures may issue operations and wait for them, as hooks of DDP do."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_overlap  # noqa: F401
from torch_overlap.testing import run_ranks


def init(rank, size, store, seconds=60, backend="torch_overlap"):
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def wait_future(x, group):
    return dist.all_reduce(x, group=group, async_op=True).get_future().wait()[0]


def wait_work(x, group):
    dist.all_reduce(x, group=group, async_op=True).wait()
    return x


def wait_sync(x, group):
    dist.all_reduce(x, group=group)
    return x


def chain(x, group):
    return dist.all_reduce(x, group=group, async_op=True).get_future()


def callbacks(rank, size, store):
    init(rank, size, store)
    other = dist.new_group()
    for group in (None, other):
        for inside in (wait_future, wait_work, wait_sync, chain):
            future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            result = future.then(lambda f, inside=inside, group=group: inside(f.value()[0], group)).wait()
            while hasattr(result, "wait"):
                result = result.wait()
            result = result[0] if isinstance(result, list) else result
            torch.testing.assert_close(result, torch.full((2,), float(size * size)))

    # Each of several callbacks waits for a future that another callback completes.
    order = [threading.Event() for _ in range(6)]

    def pass_on(f, i):
        if i > 0:
            assert order[i - 1].wait(30)
        dist.all_reduce(f.value()[0], group=groups[i])
        order[i].set()
        return f.value()[0]

    groups = [dist.new_group() for _ in order]
    chained = [
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f, i=i: pass_on(f, i))
        for i in range(len(order))
    ]
    for future in chained:
        torch.testing.assert_close(future.wait(), torch.full((1,), float(size * size)))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_a_callback_may_issue_operations_and_wait(size):
    run_ranks(callbacks, size, comm=False)


def late(rank, size, store):
    init(rank, size, store)
    lonely = dist.new_group()
    lonely.set_timeout(timedelta(seconds=2))
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="did not arrive within the timeout of 2000 ms"):
            future.then(lambda f: wait_future(f.value()[0], lonely)).wait()
        assert time.monotonic() - begin < 30
        store.set("over", "1")
    else:
        future.wait()
        store.wait(["over"], timedelta(seconds=60))
    dist.distributed_c10d._abort_process_group()


def test_a_wait_inside_a_callback_obeys_the_timeout():
    run_ranks(late, 2, comm=False, env={"TORCHCOMM_ABORT_ON_ERROR": "0"})


def power_sgd(rank, size, store):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8))
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def hooks(rank, size, store):
    results, kept = [], []
    for backend in ("gloo", "torch_overlap"):
        init(rank, size, dist.PrefixStore(backend, store), backend=backend)
        # gloo ends the process where a callback of its own thread drops the group last.
        kept += [dist.group.WORLD] if backend == "gloo" else []
        results.append(power_sgd(rank, size, store))
        dist.destroy_process_group()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_ddp_trains_with_the_power_sgd_hook():
    run_ranks(hooks, 2, comm=False, timeout=120)


def groups_dropped_by_hooks(rank, size, store):
    for i in range(12):
        init(rank, size, dist.PrefixStore(str(i), store))
        power_sgd(rank, size, store)
        dist.destroy_process_group()


def test_a_callback_may_drop_the_group_last():
    run_ranks(groups_dropped_by_hooks, 2, comm=False, timeout=120)
