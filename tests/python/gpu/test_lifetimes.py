"""Tensors live until the operation is done, even if the caller drops them, on any streams that made or used them."""

import pytest
import torch
import torch.distributed as dist

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

SHAPE = (4, 1024, 1024)
LATE = 50_000_000  # cycles by which one rank is late: the others' operation runs as long


def operations(comm):
    size = comm.get_size()
    rank, right, left = comm.get_rank(), (comm.get_rank() + 1) % size, (comm.get_rank() - 1) % size

    def room(times=1):
        return torch.empty(times * SHAPE[0], *SHAPE[1:], device="cuda")

    def ring(a, async_op):
        batch = comm.batch_op_create()
        batch.send(a, right)
        batch.recv(room(), left)
        return batch.issue(async_op=async_op)

    split = [SHAPE[0] // size] * size
    return {
        "all_reduce": lambda a, s: comm.all_reduce(a, to.ReduceOp.SUM, async_op=s),
        "all_reduce_max": lambda a, s: comm.all_reduce(a, to.ReduceOp.MAX, async_op=s),
        "broadcast": lambda a, s: comm.broadcast(a, 0, async_op=s),
        "reduce": lambda a, s: comm.reduce(a, 0, to.ReduceOp.SUM, async_op=s),
        "all_gather": lambda a, s: comm.all_gather([room() for _ in range(size)], a, async_op=s),
        "all_gather_single": lambda a, s: comm.all_gather_single(room(size), a, async_op=s),
        "reduce_scatter": lambda a, s: comm.reduce_scatter(
            torch.empty(SHAPE[0] // size, *SHAPE[1:], device="cuda"), list(a.chunk(size)), to.ReduceOp.SUM, async_op=s
        ),
        "all_to_all_single": lambda a, s: comm.all_to_all_single(room(), a, async_op=s),
        "all_to_all_v_single": lambda a, s: comm.all_to_all_v_single(room(), a, split, split, async_op=s),
        "gather": lambda a, s: comm.gather([room() for _ in range(size)] if rank == 0 else [], a, 0, async_op=s),
        "batch": ring,
    }


@pytest.mark.parametrize("waited", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
def test_memory_of_another_stream_is_not_given_away(comm, async_op, waited):
    made_on, used_on = torch.cuda.current_stream(), torch.cuda.Stream()
    base = torch.zeros(SHAPE, device="cuda")
    for name, run in operations(comm).items():
        for late in range(2):
            torch.cuda.synchronize()
            if comm.get_rank() == late:
                torch.cuda._sleep(LATE)
            a = base + 1
            used_on.wait_stream(made_on)
            with torch.cuda.stream(used_on):
                work = run(a, async_op)
                if waited:
                    work.wait()
            del work, a
            new = [base + 5 + i for i in range(4)]
            torch.cuda.synchronize()
            for i, tensor in enumerate(new):
                assert (tensor == 5 + i).all(), f"{name}: a tensor of later was overwritten"


@pytest.mark.parametrize("waited", [True, False])
def test_staged_tensors_of_torch_distributed(comm, waited):
    """Outputs that share memory, or are not contiguous, are copied after the operation."""
    group = dist.group.WORLD or pytest.skip("no process group")
    base = torch.zeros(SHAPE, device="cuda")
    made_on, used_on = torch.cuda.current_stream(), torch.cuda.Stream()
    for late in range(2):
        torch.cuda.synchronize()
        if comm.get_rank() == late:
            torch.cuda._sleep(LATE)
        a, out = base + 1, base + 2
        used_on.wait_stream(made_on)
        with torch.cuda.stream(used_on):
            work = dist.all_gather([out.transpose(0, 2)] * comm.get_size(), a.transpose(0, 2), group, async_op=True)
            if waited:
                work.wait()
        del work, a, out
        new = [base + 5 + i for i in range(4)]
        torch.cuda.synchronize()
        for i, tensor in enumerate(new):
            assert (tensor == 5 + i).all()


def test_one_stream_gets_its_memory_back_at_once(comm):
    x = torch.empty(SHAPE, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        torch.cuda._sleep(LATE)
    for async_op in (True, False):
        first = torch.empty(SHAPE, device="cuda")
        address = first.data_ptr()
        comm.all_reduce(first, to.ReduceOp.SUM, async_op=async_op).wait()
        del first
        assert torch.empty(SHAPE, device="cuda").data_ptr() == address
    torch.cuda.synchronize()
