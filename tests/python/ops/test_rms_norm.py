"""all_reduce and product followed by a residual and an RMSNorm, against the same in fp64 on one rank."""

import pytest
import torch
import torch.nn.functional as F
from fused_cases import SIZES, Data, GradientProblem, check, check_gradients, on_ranks

from torch_overlap import InvalidTypeError, InvalidValueError, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
ALGORITHMS = ["sequential", "pipelined", "p2p", "low_latency", "auto"]
EPS = 1e-3


def norm(hidden, weight):
    return hidden * (hidden.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def check_norm(results, hidden, weight, next_weight=None):
    """Checks h, and the norm as that of the returned h, or its product."""
    out, got = results
    check(got, hidden)
    expected = norm(got.double(), weight.double())
    check(out, expected if next_weight is None else expected @ next_weight.double().t())
    assert out.is_contiguous()
    assert got.is_contiguous()


def all_reduce_rank(comm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    residual, weight, bias = data(*shape), data(shape[-1]), data(shape[-1])
    kept = [t.clone() for t in (xs[me], residual)]
    total = residual.double() + sum(x.double() for x in xs)
    check_norm(ops.all_reduce_rms_norm(xs[me], residual, weight, comm, eps=EPS), total, weight)
    check_norm(ops.all_reduce_rms_norm(xs[me], residual, weight, comm, bias, eps=EPS), total + bias.double(), weight)
    for rows in (3, 0):
        after = data(rows, shape[-1])
        result = ops.all_reduce_rms_norm(xs[me], residual, weight, comm, bias, eps=EPS, next_weight=after)
        check_norm(result, total + bias.double(), weight, after)
    strided = [torch.stack([t, t], -1)[..., 0] for t in (xs[me], residual, weight)]
    check_norm(ops.all_reduce_rms_norm(*strided, comm, eps=EPS), total, weight)
    for t, before in zip((xs[me], residual), kept, strict=True):
        assert torch.equal(t, before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 4), (2, 0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_reduce_rms_norm(size, shape, dtype, seed):
    run_ranks(all_reduce_rank, size, seed, shape, dtype, backend="local")


def matmul_rank(comm, algorithm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    weights = [data(6, shape[-1]) for _ in range(size)]
    residual, norm_weight, bias = data(*shape[:-1], 6), data(6), data(6)
    total = residual.double() + sum(x.double() @ w.double().t() for x, w in zip(xs, weights, strict=True))

    def call(*bias, **options):
        return ops.matmul_all_reduce_rms_norm(
            xs[me], weights[me], residual, norm_weight, comm, *bias, eps=EPS, algorithm=algorithm, **options
        )

    check_norm(call(), total, norm_weight)
    check_norm(call(bias), total + bias.double(), norm_weight)
    for after in (data(4, 6), data(6, 4).t()):
        check_norm(call(bias, next_weight=after), total + bias.double(), norm_weight, after)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(9, 5), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_matmul_all_reduce_rms_norm(size, algorithm, shape, dtype, seed):
    on_ranks(matmul_rank, size, algorithm, seed, shape, dtype)


def all_reduce_gradients(comm, parts):
    def run(leaves):
        x, bias, residual, gain, after = leaves
        return ops.all_reduce_rms_norm(x, residual, gain, comm, bias, eps=EPS, next_weight=after)

    check_gradients(parts[comm.get_rank()], run)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_of_all_reduce(size, seed):
    """Gradients of first and second order, of the sum of all ranks' losses."""
    data = Data(seed)
    leaves = [[data(3, 4), data(4), data(3, 4), data(4), data(5, 4)] for _ in range(size)]

    def reference(every):
        total = sum(x for x, *_ in every)
        hidden = [residual + total + bias for _, bias, residual, *_ in every]
        return [[F.linear(norm(h, gain), after), h] for h, (*_, gain, after) in zip(hidden, every, strict=True)]

    run_ranks(all_reduce_gradients, size, GradientProblem(data, leaves, reference).parts, backend="local")


def gradients_of_nothing(comm):
    leaves = [torch.zeros(n, requires_grad=True) for n in ((0, 4), (0, 4), 4, 4)]
    x, residual, weight, bias = leaves
    results = ops.all_reduce_rms_norm(x, residual, weight, comm, bias, eps=EPS)
    for leaf, gradient in zip(leaves, torch.autograd.grad(results, leaves, results), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_no_rows_are_zeros(size):
    run_ranks(gradients_of_nothing, size, backend="local")


def matmul_gradients(comm, algorithm, parts):
    def run(leaves):
        x, w, bias, residual, gain, after = leaves
        return ops.matmul_all_reduce_rms_norm(
            x, w, residual, gain, comm, bias, eps=EPS, algorithm=algorithm, next_weight=after
        )

    check_gradients(parts[comm.get_rank()], run)


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_of_matmul(size, algorithm, seed):
    data = Data(seed)
    leaves = [[data(3, 4), data(6, 4), data(6), data(3, 6), data(6), data(2, 6)] for _ in range(size)]

    def reference(every):
        total = sum(F.linear(x, w) for x, w, *_ in every)
        hidden = [residual + total + bias for *_, bias, residual, _, _ in every]
        return [[F.linear(norm(h, gain), after), h] for h, (*_, gain, after) in zip(hidden, every, strict=True)]

    on_ranks(matmul_gradients, size, algorithm, GradientProblem(data, leaves, reference).parts)


def test_what_does_not_fit_is_refused():
    def rank(comm):
        x, residual, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
        w = torch.randn(6, 6)

        def refuses(kind, match, *args, **options):
            with pytest.raises(kind, match=match):
                ops.all_reduce_rms_norm(*args, comm, **options)

        refuses(
            InvalidValueError,
            r"a residual of shape \[4, 6\], .*got \[3, 6\], which differs in dimension 0",
            x,
            residual[:3],
            weight,
        )
        refuses(
            InvalidValueError,
            r"expected a residual of shape \[4, 6\], that of the sum, got \[24\]",
            x,
            residual.flatten(),
            weight,
        )
        refuses(InvalidValueError, r"norm's weight.*6.*5", x, residual, weight[:5])
        refuses(InvalidValueError, r"norm's weight with one dimension, got shape \[1, 6\]", x, residual, weight[None])
        refuses(InvalidTypeError, "norm's weight", x, residual, weight.double())
        refuses(InvalidTypeError, "residual", x, residual.bfloat16(), weight)
        refuses(
            InvalidTypeError,
            "expected x of float16, bfloat16, float32 or float64, got torch.int32",
            x.int(),
            residual,
            weight,
        )
        refuses(InvalidValueError, "expected eps >= 0, got -1", x, residual, weight, eps=-1.0)
        next_weight = r"expected next_weight \[out_features, 6\] for rows of shape \[4, 6\], got shape \[6, 5\]"
        refuses(InvalidValueError, next_weight, x, residual, weight, next_weight=torch.randn(6, 5))
        refuses(InvalidValueError, r"got shape \[6\]", x, residual, weight, next_weight=torch.randn(6))
        refuses(InvalidTypeError, "next_weight", x, residual, weight, next_weight=torch.randn(5, 6).half())
        with pytest.raises(InvalidValueError, match=next_weight):
            ops.matmul_all_reduce_rms_norm(x, w, residual, weight, comm, next_weight=torch.randn(6, 5))
        with pytest.raises(InvalidValueError, match="bias"):
            ops.all_reduce_rms_norm(x, residual, weight, comm, weight[:2])
        with pytest.raises(InvalidValueError, match="algorithm"):
            ops.matmul_all_reduce_rms_norm(x, w, residual, weight, comm, algorithm="fast")
        with pytest.raises(InvalidValueError, match="two or more dimensions"):
            ops.matmul_all_reduce_rms_norm(x[0], w, residual, weight, comm)

    run_ranks(rank, 2, backend="local")


def test_autocast_casts_all_operands():
    def rank(comm):
        x, w, residual, gain = torch.randn(4, 6), torch.randn(8, 6), torch.randn(4, 8), torch.randn(8)
        with torch.autocast("cpu", torch.bfloat16):
            out, hidden = ops.matmul_all_reduce_rms_norm(x, w, residual, gain, comm, next_weight=torch.randn(5, 8))
        assert out.dtype == hidden.dtype == torch.bfloat16
        leaf = torch.randn(5, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            for after in (leaf, leaf.detach()):  # with gradients and without
                out, _ = ops.all_reduce_rms_norm(residual, residual, gain, comm, next_weight=after)
                assert out.dtype == torch.float32

    run_ranks(rank, 2, backend="local")
