"""Algorithm "low_latency": sums of one and of two shots, the same bits on all ranks, any order on one memory, and
the conditions under which "auto" selects it."""

import random

import pytest
import torch
import torch.nn.functional as F
from fused_cases import Data, check

import torch_overlap as to
from torch_overlap import _C, _tuning, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
ONE_SHOT, TWO_SHOTS = (17, 12, 300), (70, 12, 1000)  # rows, inner size, features
FEW_ROWS = (2, 12, 40_000)  # fewer rows than ranks: some ranks sum nothing


def operands(data, size, shape):
    rows, inner, features = shape
    return [data(rows, inner) for _ in range(size)], [data(features, inner) for _ in range(size)], data(features)


def total_of(xs, weights):
    return sum(x.double() @ w.double().t() for x, w in zip(xs, weights, strict=True))


def all_gathered(comm, x):
    every = torch.empty(comm.get_size(), *x.shape, dtype=x.dtype)
    comm.all_gather_single(every, x.contiguous(), async_op=False)
    return every


def sum_rank(comm, number, shape, dtype):
    me, data = comm.get_rank(), Data(number, dtype)
    xs, weights, bias = operands(data, comm.get_size(), shape)
    want = total_of(xs, weights)
    for op, factor in (("sum", 1), ("avg", comm.get_size())):
        for b in (None, bias):
            got = ops.matmul_all_reduce(xs[me], weights[me], comm, b, op=op, algorithm="low_latency")
            check(got, want / factor + (0 if b is None else b.double()))
            assert all(torch.equal(other, got) for other in all_gathered(comm, got))
            assert torch.equal(ops.matmul_all_reduce(xs[me], weights[me], comm, b, op=op, algorithm="low_latency"), got)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [ONE_SHOT, TWO_SHOTS, FEW_ROWS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_have_the_same_bits_everywhere_and_in_every_call(size, shape, dtype, seed):
    run_ranks(sum_rank, size, seed, shape, dtype)


def rounded_once_rank(comm, number, shape):
    """Operands are integers, whose products are exact before they are rounded to 16 bits."""
    me, size, draw = comm.get_rank(), comm.get_size(), torch.Generator().manual_seed(number)

    def data(*sizes):
        return torch.randint(-9, 10, sizes, generator=draw).bfloat16()

    xs, weights, _ = operands(data, size, shape)
    parts = [F.linear(x, w).float() for x, w in zip(xs, weights, strict=True)]
    want = sum(parts[1:], parts[0]).bfloat16()
    got = ops.matmul_all_reduce(xs[me], weights[me], comm, algorithm="low_latency")
    assert torch.equal(got, want)
    if shape[0] % size == 0:
        got = ops.matmul_reduce_scatter(xs[me], weights[me], comm, algorithm="low_latency")
        assert torch.equal(got, want.chunk(size)[me])


@pytest.mark.parametrize("shape", [(18, 12, 300), (72, 12, 4000)], ids=str)
def test_sums_are_in_rank_order_and_rounded_once(shape, seed):
    run_ranks(rounded_once_rank, 3, seed, shape)


def any_order_rank(comm, number):
    """An operation of another size reuses the memory at once: data of the previous one must not be overwritten too
    early."""
    me, size, draw = comm.get_rank(), comm.get_size(), random.Random(number)
    data = Data(number)
    _C._set_interleaving(number % 1000 + 1)
    try:
        for _ in range(30):
            rows, features = draw.choice([0, 1, 4, 9]) * size, draw.choice([0, 3, 800, 20_000])
            xs, weights, bias = operands(data, size, (rows, draw.choice([0, 5, 5, 5]), features))
            kind = draw.choice(["gather", "scatter", "sum"])
            if kind == "gather":
                (got,), _ = ops.all_gather_matmul(xs[me], [weights[0]], comm, [bias], algorithm="low_latency")
                want = F.linear(torch.cat(xs), weights[0], bias)
            elif kind == "scatter":
                got = ops.matmul_reduce_scatter(xs[me], weights[me], comm, bias, algorithm="low_latency")
                want = total_of(xs, weights).chunk(size)[me] + bias
            else:
                got = ops.matmul_all_reduce(xs[me], weights[me], comm, bias, algorithm="low_latency")
                want = total_of(xs, weights) + bias
            check(got, want)
    finally:
        _C._set_interleaving(0)


@pytest.mark.parametrize("size", [2, 4])
def test_any_order_on_one_memory(size, seed):
    run_ranks(any_order_rank, size, seed)


def calls(comm):
    x, w = torch.randn(64, 8), torch.randn(16, 8)
    return {
        "all_gather_matmul": ((x, [w], comm), (64 * comm.get_size(), 16 * comm.get_size(), 8)),
        "matmul_reduce_scatter": ((x, w, comm), (64, 16, 8 * comm.get_size())),
        "matmul_all_reduce": ((x, w, comm), (64, 16, 8 * comm.get_size())),
    }


def measured_rank(comm):
    found = calls(comm)
    for op, (args, _) in found.items():
        assert to.explain(op, *args).algorithm == "sequential"
        assert to.explain(op, *args, algorithm="low_latency").why == "asked for"
    entries = {
        _C._tuning_key(op, *shape, torch.float32, comm.get_size(), "cpu", False): "low_latency"
        for op, (_, shape) in found.items()
    }
    _C._set_tuning("table", entries)
    try:
        for op, (args, _) in found.items():
            explained = to.explain(op, *args)
            assert (explained.algorithm, explained.decided_by) == ("low_latency", "table")
            got, want = (getattr(ops, op)(*args, algorithm=way) for way in ("auto", "sequential"))
            if op == "all_gather_matmul":
                (got,), (want,) = got[0], want[0]
            check(got, want)
        (x, w, _), _ = found["matmul_all_reduce"]
        explained = to.explain("matmul_all_reduce_rms_norm", x, w, torch.zeros(64, 16), torch.ones(16), comm)
        assert explained.algorithm == "sequential"
        assert "sum without the norm" in explained.why
    finally:
        _C._set_tuning("table", {})
        _tuning.load()


def test_auto_takes_it_where_it_was_measured():
    run_ranks(measured_rank, 2)


def without_rank(comm):
    x, w = torch.randn(64, 8), torch.randn(16, 8)
    for op, args in (("all_to_all_matmul", (x, w, comm)), ("matmul_all_to_all", (x, [w], comm))):
        with pytest.raises(ValueError, match="algorithm to be one of auto sequential pipelined p2p, got 'low_latency'"):
            getattr(ops, op)(*args, algorithm="low_latency")


def test_operators_without_it_say_so():
    run_ranks(without_rank, 2)
