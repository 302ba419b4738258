"""A NaN of any rank propagates through MIN and MAX, at every size, with custom collectives and over NCCL."""

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [1, 16, 1000, 1 << 15, 1 << 20, (1 << 22) + 8]


def reference(values, op):
    result = values[0]
    for value in values[1:]:
        result = (torch.maximum if op == "MAX" else torch.minimum)(result, value)
    return result


def same(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_propagates(comm, seed, op, dtype):
    size, rank = comm.get_size(), comm.get_rank()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    reduce_op = getattr(to.ReduceOp, op)
    for numel in SIZES:
        values = []
        for r in range(size):
            value = torch.randn(size * numel, generator=generator, device="cuda")
            value[torch.rand(value.shape, generator=generator, device="cuda") < 0.1] = float("nan")
            if numel == 1:
                value[:] = float("nan") if r == size - 1 else float(r)
            value[value > 2] = float("inf")
            values.append(value.to(dtype).double())
        mine = values[rank].to(dtype)
        expected = reference(values, op)

        x = mine[:numel].clone()
        comm.all_reduce(x, reduce_op, async_op=False)
        same(x, expected[:numel])
        x = mine[:numel].clone()
        comm.reduce(x, 0, reduce_op, async_op=True).wait()
        same(x, expected[:numel] if rank == 0 else values[rank][:numel])
        part = torch.empty(numel, dtype=dtype, device="cuda")
        comm.reduce_scatter_single(part, mine, reduce_op, async_op=False)
        same(part, expected[rank * numel : (rank + 1) * numel])
        part.zero_()
        comm.reduce_scatter(part, list(mine.clone().chunk(size)), reduce_op, async_op=False)
        same(part, expected[rank * numel : (rank + 1) * numel])


def test_captured(comm, seed):
    x = torch.zeros((1 << 22) + 8, device="cuda")
    comm.all_reduce(x, to.ReduceOp.MAX, async_op=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, to.ReduceOp.MAX, async_op=False)
    for who in range(comm.get_size()):
        x.fill_(comm.get_rank())
        if comm.get_rank() == who:
            x[::1000] = float("nan")
        graph.replay()
        assert x[::1000].isnan().all()
        rest = x[1::1000]
        assert (rest == comm.get_size() - 1).all()
