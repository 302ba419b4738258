"""torch.distributed exchanges elements in their logical order, for any strides of each rank's tensor."""

from __future__ import annotations

import secrets
import warnings
from datetime import timedelta

import layout_cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import torch_overlap
from torch_overlap.testing import gpu_of, run_ranks


def init(rank, size, store):
    warnings.filterwarnings("ignore", message=".*deprecated.*")
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def sweep(rank, size, store, seed):
    init(rank, size, store)
    layout_cases.run_all(rank, size, seed)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_keeps_the_logical_order(size):
    run_ranks(sweep, size, secrets.randbelow(10**6), comm=False, timeout=120)


def cuda_sweep(rank, size, store, seed, device_id):
    torch.cuda.set_device(gpu_of(rank))
    device = gpu_of(rank)
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60),
                            device_id=device if device_id else None)  # fmt: skip
    layout_cases.run_all(rank, size, seed, device)
    dist.destroy_process_group()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("device_id", [False, True])
def test_every_operation_keeps_the_logical_order_on_gpus(device_id):
    run_ranks(cuda_sweep, 2, secrets.randbelow(10**6), device_id, comm=False, timeout=300)


def other_views(rank, size, store):
    init(rank, size, store)
    # A leaf that requires a gradient, in inference mode too.
    leaf = torch.full((3, 2), rank + 1.0).t().requires_grad_()
    dist.all_reduce(leaf)
    torch.testing.assert_close(leaf.detach(), torch.full((2, 3), size * (size + 1) / 2))
    with torch.inference_mode():
        y = torch.full((3, 2), rank + 1.0).t()
        dist.all_reduce(y, async_op=True).wait()
        torch.testing.assert_close(y, torch.full((2, 3), size * (size + 1) / 2))

    # Elements that share memory can be read, not written.
    row = torch.full((1, 3), float(rank)).expand(2, 3)
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, row)
    for r in range(size):
        assert (outputs[r] == r).all()
    before = row.clone()
    with pytest.raises(RuntimeError, match=r"all_reduce: expected .* share no memory, got .* call .clone"):
        dist.all_reduce(row)
    torch.testing.assert_close(row, before)
    # The version counter stays as it is, as with a contiguous tensor.
    z = torch.ones(3, 2).t()
    dist.broadcast(z, src=0)
    assert z._version == 0
    dist.destroy_process_group()


def test_expanded_tensors_and_autograd():
    run_ranks(other_views, 2, comm=False)


def shared_outputs(rank, size, store):
    init(rank, size, store)
    # A list that contains a tensor twice reduces it once.
    t = torch.tensor([1.0 + rank])
    dist.all_reduce_coalesced([t, t])
    assert t.item() == sum(1.0 + r for r in range(size))
    whole = torch.arange(6.0) + rank
    dist.all_reduce_coalesced([whole[:4], whole[2:]])
    torch.testing.assert_close(whole, sum(torch.arange(6.0) + r for r in range(size)))

    # An input that overlaps outputs other than in place. On one rank it is in place, and no rank may fail while others
    # go on.
    same = torch.full((3, 3), rank + 1.0)
    dist.all_gather([same] * size, same)
    assert (same == size).all()
    shifted = torch.arange(2.0 * size + 1) + 100 * rank
    expected = torch.cat([torch.tensor([1.0, 2.0]) + 100 * r for r in range(size)])
    dist.all_gather_into_tensor(shifted[: 2 * size], shifted[1:3])
    torch.testing.assert_close(shifted[: 2 * size], expected)
    shifted = torch.arange(2.0 * size + 1) + 100 * rank
    expected = sum(torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] + 100 * r for r in range(size))
    dist.reduce_scatter_tensor(shifted[1:3], shifted[: 2 * size])
    torch.testing.assert_close(shifted[1:3], expected)
    row = torch.arange(4.0).reshape(2, 2) + 10 * rank
    dist.reduce_scatter(row[0], [row[1], row[0]])  # rank 0 gets the sum of row 1, rank 1 that of row 0
    torch.testing.assert_close(row[0], sum(torch.arange(4.0).reshape(2, 2)[1 - rank] + 10 * r for r in range(size)))

    # A batch that receives twice into one buffer, as the set-up of pipelining does, and into the tensor that it sends.
    buffer, peer = torch.zeros(2), 1 - rank
    ops = [dist.P2POp(dist.isend, torch.full((2,), 10.0 * rank + i), peer) for i in range(2)]
    ops += [dist.P2POp(dist.irecv, buffer, peer) for _ in range(2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    torch.testing.assert_close(buffer, torch.full((2,), 10.0 * peer + 1))
    x = torch.full((3,), float(rank))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x, peer)]):
        work.wait()
    torch.testing.assert_close(x, torch.full((3,), float(peer)))
    dist.destroy_process_group()


def test_tensors_that_share_memory():
    run_ranks(shared_outputs, 2, comm=False)


def three_outputs(rank, size, store):
    init(rank, size, store)
    whole = torch.zeros(6)
    dist.all_gather([whole[0:2], whole[1:3], whole[2:4]], torch.full((2,), rank + 1.0))
    torch.testing.assert_close(whole, torch.tensor([1.0, 2, 3, 3, 0, 0]))
    dist.destroy_process_group()


def test_three_outputs_of_which_one_meets_both_others():
    run_ranks(three_outputs, 3, comm=False)


def rows_that_do_not_divide(rank, size, store):
    init(rank, size, store)
    for output, input in ((torch.empty(size + 1, size), torch.ones(size + 1, size)),
                          (torch.empty(size, size + 1), torch.ones(size + 1, size))):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"all_to_all_single: expected .* first dimension divisible by 2"):
            dist.all_to_all_single(output, input)
    dist.barrier()
    dist.destroy_process_group()


def test_all_to_all_single_refuses_rows_that_do_not_divide():
    run_ranks(rows_that_do_not_divide, 2, comm=False)


class First(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x):
        return self.linear(x).transpose(1, 2)


class Middle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x)).transpose(1, 2)


class Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.linear(x)


def pipeline(rank, size, store):
    init(rank, size, store)
    torch.manual_seed(0)
    stages = [First(), Middle(), Last()]
    x, target = torch.randn(4, 5, 4), torch.randn(4, 5, 2)
    torch.nn.functional.mse_loss(torch.nn.Sequential(*stages)(x), target).backward()
    expected = [parameter.grad.clone() for parameter in stages[rank].parameters()]
    stages[rank].zero_grad()

    stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))
    for parameter, gradient in zip(stages[rank].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    dist.destroy_process_group()


def test_a_pipeline_with_a_middle_stage_trains_as_one_process_does():
    """Activations and gradients are transposed views: the memory of one stage has another order than that of the
    next."""
    run_ranks(pipeline, 3, comm=False, timeout=120)


def communicator_refuses(comm):
    """TorchComm's own calls accept contiguous tensors only, including lists, batches and windows."""
    size, rank = comm.get_size(), comm.get_rank()
    good, bad = torch.zeros(2, 3), torch.zeros(3, 2).t()
    peer = (rank + 1) % size
    SUM = torch_overlap.ReduceOp.SUM
    calls = [
        lambda: comm.send(bad, peer, async_op=False),
        lambda: comm.recv(bad, peer, async_op=False),
        lambda: comm.broadcast(bad, 0, async_op=False),
        lambda: comm.all_reduce(bad, SUM, async_op=False),
        lambda: comm.reduce(bad, 0, SUM, async_op=False),
        lambda: comm.all_gather([bad] * size, good, async_op=False),
        lambda: comm.all_gather([torch.zeros(2, 3) for _ in range(size)], bad, async_op=False),
        lambda: comm.all_gather_single(torch.zeros(3, 2 * size).t(), good, async_op=False),
        lambda: comm.reduce_scatter(good, [bad] * size, SUM, async_op=False),
        lambda: comm.reduce_scatter_single(bad, torch.zeros(2 * size, 3), SUM, async_op=False),
        lambda: comm.all_to_all([torch.zeros(2, 3) for _ in range(size)], [bad] * size, async_op=False),
        lambda: comm.all_to_all_single(torch.zeros(3, 2).t(), good, async_op=False),
        lambda: comm.scatter(bad, [good] * size if rank == 0 else [], 0, async_op=False),
        lambda: comm.gather([bad] * size if rank == 0 else [], bad, 0, async_op=False),
    ]
    for call in calls:
        with pytest.raises(torch_overlap.InvalidValueError, match="contiguous"):
            call()
    batch = comm.batch_op_create()
    batch.send(bad, peer)
    with pytest.raises(torch_overlap.InvalidValueError, match="contiguous"):
        batch.issue(async_op=False)
    comm.barrier(async_op=False)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_communicator_refuses_other_layouts(backend):
    run_ranks(communicator_refuses, 2, backend=backend)
