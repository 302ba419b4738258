"""A product concurrent with an independent collective, against both in fp64 on one rank."""

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from fused_cases import SIZES, Data, GradientProblem, check, check_gradients, leaf, on_ranks

from torch_overlap import InvalidTypeError, UnsupportedError, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FORCED = ["sequential", "pipelined", "bulk"]
ALGORITHMS = [*FORCED, "auto"]
COLLECTIVES = ["all_gather", "reduce_scatter"]


def collected(others, collective, dim):
    """Returns the result of the collective from all ranks' tensors, by rank."""
    if collective == "all_gather":
        return [torch.cat(others, dim)] * len(others)
    return list(torch.stack(others).sum(0).chunk(len(others), dim))


def bulk_rank(comm, algorithm, number, collective, shape, dim, dtypes):
    me, size = comm.get_rank(), comm.get_size()
    data, other_data = Data(number, dtypes[0]), Data(number + 1, dtypes[1])
    xs = [data(2, 3, 5) for _ in range(size)]
    weights = [data(4, 5) for _ in range(size)]
    bias = data(4)
    others = [other_data(*shape) for _ in range(size)]
    want = collected([o.double() for o in others], collective, dim)[me]
    options = {"collective": collective, "dim": dim, "algorithm": algorithm}
    for with_bias in (False, True):
        product, result = ops.bulk_overlap_matmul(
            xs[me], weights[me], others[me], comm, bias if with_bias else None, **options
        )
        check(product, F.linear(xs[me].double(), weights[me].double(), bias.double() if with_bias else None))
        if collective == "all_gather":
            assert torch.equal(result.double(), want)
        else:
            check(result, want)
        assert (product.dtype, result.dtype) == dtypes
        assert all(t.is_contiguous() for t in (product, result))
    strided = others[me].transpose(0, -1).contiguous().transpose(0, -1)
    check(ops.bulk_overlap_matmul(xs[me], weights[me], strided, comm, **options)[1], want)


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "collective": COLLECTIVES,
        "shape,dim": [((12,), 0), ((12, 3), 0), ((3, 12), 1), ((2, 12, 5), -2), ((0, 3), 0)],
    },
    strength=3,
)
def test_bulk_overlap_matmul(size, algorithm, collective, shape, dim, seed):
    for dtypes in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        on_ranks(bulk_rank, size, algorithm, seed, collective, shape, dim, dtypes)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_parts_of_an_odd_number_of_elements(algorithm, collective, seed):
    on_ranks(bulk_rank, 2, algorithm, seed, collective, (2 * 8193,), 0, (torch.float32, torch.bfloat16))


def integers_rank(comm, algorithm):
    x, w = torch.ones(4, 5), torch.ones(3, 5)
    other = torch.arange(6, dtype=torch.int64) + 10 * comm.get_rank()
    _, gathered = ops.bulk_overlap_matmul(x, w, other, comm, collective="all_gather", algorithm=algorithm)
    assert torch.equal(gathered, torch.cat([torch.arange(6), torch.arange(6) + 10]))
    reduce = {"collective": "reduce_scatter", "algorithm": algorithm}
    if algorithm == "bulk":
        with pytest.raises(UnsupportedError, match=r"for algorithm 'bulk', got torch\.int64; use 'pipelined'"):
            ops.bulk_overlap_matmul(x, w, other, comm, **reduce)
        return
    _, part = ops.bulk_overlap_matmul(x, w, other, comm, **reduce)
    assert torch.equal(part, (2 * torch.arange(6) + 10).chunk(2)[comm.get_rank()])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_integers(algorithm):
    on_ranks(integers_rank, 2, algorithm)


def test_the_larger_of_two_problems_gets_a_larger_channel(seed):
    on_ranks(growing_rank, 2, "bulk", seed)


def growing_rank(comm, algorithm, number):
    for shape in ((12,), (1 << 20,), (24, 3)):
        for collective in COLLECTIVES:
            bulk_rank(comm, algorithm, number, collective, shape, 0, (torch.float32, torch.float32))


# --- Gradients ---------------------------------------------------------------------------------------


def gradients_rank(comm, algorithm, parts, collective, dim):
    def sharded(mine):
        x, w, b, other = mine
        return ops.bulk_overlap_matmul(x, w, other, comm, b, collective=collective, dim=dim, algorithm=algorithm)

    check_gradients(parts[comm.get_rank()], sharded)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("shape", "dim"), [((12, 2), 0), ((2, 12), 1)])
def test_gradients(size, algorithm, collective, shape, dim, seed):
    data = Data(seed)
    leaves = [[data(2, 3, 5), data(4, 5), data(4), data(*shape)] for _ in range(size)]

    def reference(leaves):
        results = collected([mine[3] for mine in leaves], collective, dim)
        return [[F.linear(x, w, b), results[r]] for r, (x, w, b, _) in enumerate(leaves)]

    problem = GradientProblem(data, leaves, reference)
    on_ranks(gradients_rank, size, algorithm, problem.parts, collective, dim)


def asked_gradients_rank(comm, algorithm, collective, x, w, b, other):
    ones = torch.ones(3, 4, dtype=torch.float64)
    wants = (ones @ w, ones.t() @ x, ones.sum(0), torch.full((6,), 2.0 if collective == "all_gather" else 1.0).double())
    for needs in range(1, 16):
        for with_bias in (False, True):
            tensors = [t.clone().requires_grad_(bool(needs >> i & 1)) for i, t in enumerate((x, w, b, other))]
            product, result = ops.bulk_overlap_matmul(
                tensors[0], tensors[1], tensors[3], comm, tensors[2] if with_bias else None,
                collective=collective, algorithm=algorithm,
            )  # fmt: skip
            loss = product.sum() + result.sum()
            if not loss.requires_grad:
                continue
            loss.backward()
            for i, (t, want) in enumerate(zip(tensors, wants, strict=True)):
                assert (t.grad is None) == (not t.requires_grad or (i == 2 and not with_bias))
                if t.grad is not None:
                    check(t.grad, want)
    # One of the two results is used.
    for used in range(2):
        tensors = [t.clone().requires_grad_() for t in (x, w, b, other)]
        results = ops.bulk_overlap_matmul(
            tensors[0], tensors[1], tensors[3], comm, tensors[2], collective=collective, algorithm=algorithm
        )
        results[used].sum().backward()
        for i, (t, want) in enumerate(zip(tensors, wants, strict=True)):
            assert (t.grad is None) == ((i == 3) == (used == 0))
            if t.grad is not None:
                check(t.grad, want)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_only_the_gradients_that_are_asked_are_computed(algorithm, collective, seed):
    data = Data(seed)
    on_ranks(asked_gradients_rank, 2, algorithm, collective, data(3, 5), data(4, 5), data(4), data(6))


# --- Order, autocast, errors --------------------------------------------------------------------------


def order_rank(comm):
    x, w, other = torch.randn(8, 5), torch.randn(4, 5), torch.randn(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.bulk_overlap_matmul(x, w, other, comm, collective="all_gather", algorithm="pipelined")
    found = [e for e in profile.events() if e.name.startswith("torch_overlap::chunk")]
    found.sort(key=lambda e: e.time_range.start)
    assert [e.name for e in found] == [f"torch_overlap::chunk_{name}[0]" for name in ("comm", "gemm", "wait")]


def test_the_collective_is_under_way_during_the_product():
    run_ranks(order_rank, 2, backend="gloo")


def test_autocast_casts_the_operands_of_the_product(seed):
    data = Data(seed, torch.float32)
    x, w, other = data(3, 5), data(4, 5), data(6)

    def rank(comm):
        tensors = [leaf(t) for t in (x, w, other)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product, result = ops.bulk_overlap_matmul(*tensors, comm, collective="reduce_scatter")
        assert (product.dtype, result.dtype) == (torch.bfloat16, torch.float32)
        check(product.detach(), F.linear(x, w))
        check(result.detach(), (2 * other).chunk(2)[comm.get_rank()])
        (product.sum() + result.sum()).backward()
        assert all(t.grad.dtype == torch.float32 for t in tensors)

    run_ranks(rank, 2, backend="local")


def call(comm, x, w, other=None, bias=None, collective="reduce_scatter", **options):
    other = torch.ones(4) if other is None else other
    return ops.bulk_overlap_matmul(x, w, other, comm, bias, collective=collective, **options)


ERRORS = {
    "algorithm to be one of auto sequential pipelined bulk, got 'p2p'": lambda c, x, w: call(c, x, w, algorithm="p2p"),
    "collective to be one of all_gather reduce_scatter, got 'all_reduce'": (
        lambda c, x, w: call(c, x, w, collective="all_reduce")
    ),
    "two or more dimensions, got shape": lambda c, x, w: call(c, x[0], w),
    r"in_features 5 as x, got shape \[5, 4\]": lambda c, x, w: call(c, x, w.t()),
    r"a bias \[out_features\] of 4 elements, got shape \[3\]": lambda c, x, w: call(c, x, w, bias=x[:3, 0]),
    "divisible by the group size 2, got 3": lambda c, x, w: call(c, x, w, torch.ones(3)),
    r"expected dim in \[-1, 0\], got 1": lambda c, x, w: call(c, x, w, dim=1),
    "one or more dimensions, got a scalar": lambda c, x, w: call(c, x, w, torch.ones(())),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_mistake_is_an_error_that_says_what_to_do(message, needs_gradient):
    def rank(comm):
        with pytest.raises(ValueError, match=f"bulk_overlap_matmul: .*{message}"):
            ERRORS[message](comm, torch.ones(4, 5, requires_grad=needs_gradient), torch.ones(4, 5))
        with pytest.raises(InvalidTypeError, match=r"a weight of dtype torch\.float32 as x, got torch\.float64"):
            call(comm, torch.ones(4, 5), torch.ones(4, 5, dtype=torch.float64))
        integers = torch.ones(4, 5, dtype=torch.int32)
        with pytest.raises(
            UnsupportedError, match=r"what algorithm 'bulk' needs, got: products of torch\.int32 are torch's"
        ):
            call(comm, integers, integers, algorithm="bulk")

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_eight_ranks(collective, seed):
    """A whole host."""
    for algorithm in FORCED:
        test_bulk_overlap_matmul(8, algorithm, collective, (3, 16), 1, seed)
