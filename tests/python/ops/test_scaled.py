"""Fused products of 8-bit floats, against their dequantized operands in fp64 on one rank."""

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from fused_cases import SIZES, Data, on_ranks

from torch_overlap import ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
ALGORITHMS = ["sequential", "pipelined", "p2p", "auto"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Tolerance of a sum over ranks of products that are rounded one by one; magnitudes are near 10.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 4e-1}


def quantized(x, dtype=E4M3):
    data, scale_inv, *_ = ops.quantize(x, dtype=dtype)
    return data, scale_inv


def value(data, scale_inv):
    return data.double() * scale_inv.double()


def check(got, want, out_dtype):
    assert got.dtype == out_dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=TOLERANCE[out_dtype])


def gather_rank(comm, algorithm, number, shape, dim, out_dtype, dtypes):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    # The x of all ranks has one factor, which the operator requires.
    x, x_scale_inv = quantized(data(size, *shape), dtypes[0])
    weights = [[quantized(data(n, shape[-1]), dtypes[1]) for n in (16, 32)] for _ in range(size)]
    bias = data(32).to(out_dtype)
    gathered = torch.cat(list(value(x, x_scale_inv)), dim)
    for biases in ((), [None, bias]):
        for split in (False, True):
            results, *_ = ops.scaled_all_gather_matmul(
                x[me], x_scale_inv, [w for w, _ in weights[me]], [s for _, s in weights[me]], comm, biases,
                gather_dim=dim, out_dtype=out_dtype, use_split_accumulator=split, algorithm=algorithm,
            )  # fmt: skip
            assert len(results) == 2
            for i, result in enumerate(results):
                added = bias.double() if biases and i == 1 else None
                check(result, F.linear(gathered, value(*weights[me][i]), added), out_dtype)


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape,dim": [((3, 32), 0), ((2, 3, 16), 1)],
        "out_dtype": [torch.float32, torch.float16, torch.bfloat16],
    },
    strength=3,
)
def test_scaled_all_gather_matmul(size, algorithm, shape, dim, out_dtype, seed):
    on_ranks(gather_rank, size, algorithm, seed, shape, dim, out_dtype, (E4M3, E4M3))


def scatter_rank(comm, algorithm, number, shape, dim, op, out_dtype, dtypes):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    xs = [quantized(data(*shape) * (r + 1), dtypes[0]) for r in range(size)]  # each with a factor of its own
    weights = [quantized(data(16, shape[-1]), dtypes[1]) for _ in range(size)]
    bias = data(16).to(out_dtype)
    total = sum(F.linear(value(*x), value(*w)) for x, w in zip(xs, weights, strict=True))
    part = (total / size if op == "avg" else total).chunk(size, dim)[me]
    for added in (None, bias):
        result = ops.scaled_matmul_reduce_scatter(
            *xs[me], *weights[me], comm, added, scatter_dim=dim, op=op, out_dtype=out_dtype, algorithm=algorithm
        )
        check(result, part if added is None else part + bias.double(), out_dtype)


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape,dim": [((12, 32), 0), ((2, 12, 16), 1)],
        "op": ["sum", "avg"],
        "out_dtype": [torch.float32, torch.float16, torch.bfloat16],
    },
    strength=3,
)
def test_scaled_matmul_reduce_scatter(size, algorithm, shape, dim, op, out_dtype, seed):
    on_ranks(scatter_rank, size, algorithm, seed, shape, dim, op, out_dtype, (E4M3, E4M3))


def all_reduce_rank(comm, algorithm, number, shape, op, out_dtype, dtypes):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    xs = [quantized(data(*shape) * (r + 1), dtypes[0]) for r in range(size)]  # each with a factor of its own
    weights = [quantized(data(16, shape[-1]), dtypes[1]) for _ in range(size)]
    bias = data(16).to(out_dtype)
    total = sum(F.linear(value(*x), value(*w)) for x, w in zip(xs, weights, strict=True))
    total = total / size if op == "avg" else total
    for added in (None, bias):
        result = ops.scaled_matmul_all_reduce(
            *xs[me], *weights[me], comm, added, op=op, out_dtype=out_dtype, algorithm=algorithm
        )
        check(result, total if added is None else total + bias.double(), out_dtype)


# 5 rows in 4 pieces, on more ranks than rows; [7, 1, 32] has a number of rows that no number of ranks divides.
@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape": [(5, 32), (7, 1, 32), (2, 12, 16)],
        "op": ["sum", "avg"],
        "out_dtype": [torch.float32, torch.float16, torch.bfloat16],
    },
    strength=3,
)
def test_scaled_matmul_all_reduce(size, algorithm, shape, op, out_dtype, seed):
    on_ranks(all_reduce_rank, size, algorithm, seed, shape, op, out_dtype, (E4M3, E4M3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)])
def test_two_8_bit_types(algorithm, dtypes, seed):
    on_ranks(gather_rank, 2, algorithm, seed, (3, 16), 0, torch.float32, dtypes)
    on_ranks(scatter_rank, 2, algorithm, seed, (4, 16), 0, "sum", torch.float32, dtypes)
    on_ranks(all_reduce_rank, 2, algorithm, seed, (3, 16), "sum", torch.float32, dtypes)


def test_the_default_is_bfloat16():
    def rank(comm):
        x, s = quantized(torch.randn(16, 16))
        assert ops.scaled_all_gather_matmul(x, s, [x], [s], comm)[0][0].dtype == torch.bfloat16
        assert ops.scaled_matmul_reduce_scatter(x, s, x, s, comm).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert ops.scaled_matmul_reduce_scatter(x, s, x, s, comm).dtype == torch.bfloat16
            assert ops.scaled_matmul_all_reduce(x, s, x, s, comm).dtype == torch.bfloat16

    run_ranks(rank, 2, backend="local")


def test_there_is_no_gradient():
    def rank(comm):
        x, s = quantized(torch.randn(16, 16))
        s.requires_grad_()
        for result in (
            ops.scaled_all_gather_matmul(x, s, [x], [s], comm)[0][0],
            ops.scaled_matmul_reduce_scatter(x, s, x, s, comm),
            ops.scaled_matmul_all_reduce(x, s, x, s, comm),
        ):
            with pytest.raises(RuntimeError, match=r"scaled_.* is not implemented"):
                result.sum().backward()

    run_ranks(rank, 2, backend="local")


def gather(comm, x, s, w, biases=(), scales=None, **options):
    return ops.scaled_all_gather_matmul(x, s, [w], [s] if scales is None else scales, comm, biases, **options)


def scatter(comm, x, s, w, bias=None, **options):
    return ops.scaled_matmul_reduce_scatter(x, s, w, s, comm, bias, **options)


def all_reduce(comm, x, s, w, bias=None, **options):
    return ops.scaled_matmul_all_reduce(x, s, w, s, comm, bias, **options)


VALUE_ERRORS = {
    "algorithm to be one of auto sequential pipelined p2p fused, got 'bulk'": lambda f, c, x, s: f(
        c, x, s, x, algorithm="bulk"
    ),
    "two or more dimensions, got shape": lambda f, c, x, s: f(c, x[0], s, x),
    r"expected .* \[out_features, in_features\] with in_features 16 as x, got shape \[16\]": lambda f, c, x, s: f(
        c, x, s, x[0]
    ),
    r"in_features 16 as x, got shape \[16, 8\]": lambda f, c, x, s: f(c, x, s, x[:, :8]),
}
TYPE_ERRORS = {
    "x of dtype float8_e4m3fn or float8_e5m2, got torch.float32. Use quantize": lambda f, c, x, s: f(
        c, x.float(), s, x
    ),
    r"(a weight|weights\[0\]) of dtype float8_e4m3fn or float8_e5m2, got torch.bfloat16": lambda f, c, x, s: f(
        c, x, s, x.bfloat16()
    ),
    "out_dtype float32, float16 or bfloat16, got torch.float64": lambda f, c, x, s: f(
        c, x, s, x, out_dtype=torch.float64
    ),
}


@pytest.mark.parametrize("function", [gather, scatter, all_reduce])
def test_a_mistake_is_an_error_that_says_what_to_do(function):
    def rank(comm):
        x, s = quantized(torch.randn(16, 16))
        for errors, kind in ((VALUE_ERRORS, ValueError), (TYPE_ERRORS, TypeError)):
            for message, call in errors.items():
                with pytest.raises(kind, match=f"^scaled_.*: .*{message}"):
                    call(function, comm, x, s)
        for scale in (s.double(), torch.ones(2), torch.ones(0)):
            with pytest.raises((ValueError, TypeError), match=r"^scaled_.*: expected"):
                function(comm, x, scale, x)

    run_ranks(rank, 2, backend="local")


def test_mistakes_of_one_operator():
    def rank(comm):
        x, s = quantized(torch.randn(16, 16))
        for message, call in {
            "gather_dim to be a dimension of rows, got 1": lambda: gather(comm, x, s, x, gather_dim=1),
            "scatter_dim to be a dimension of rows, got -1": lambda: scatter(comm, x, s, x, scatter_dim=-1),
            "one scale_inv for each of the 1 weights in weights_scale_inv, got 0": lambda: gather(
                comm, x, s, x, scales=[]
            ),
            "one entry for each of the 1 weights, got 2": lambda: gather(comm, x, s, x, [None, None]),
            "one or more weights, got none": lambda: ops.scaled_all_gather_matmul(x, s, [], [], comm),
            r"a bias \[out_features\] of 16 elements, got shape \[3\]": lambda: scatter(
                comm, x, s, x, torch.ones(3).bfloat16()
            ),
            r"biases\[0\] \[out_features\] of 16 elements, got shape \[2, 2\]": lambda: gather(
                comm, x, s, x, [torch.ones(2, 2).bfloat16()]
            ),
            "op to be one of sum avg, got 'max'": lambda: scatter(comm, x, s, x, op="max"),
            "all_reduce: expected op to be one of sum avg, got 'min'": lambda: all_reduce(comm, x, s, x, op="min"),
            "divisible by the group size 2, got 3": lambda: scatter(comm, x[:3], s, x),
        }.items():
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(TypeError, match=r"a bias of dtype torch\.bfloat16, that of the result, got torch\.float32"):
            scatter(comm, x, s, x, torch.ones(16))

    run_ranks(rank, 2, backend="local")


def sizes_rank(comm, algorithm):
    """Operands that the product refuses are refused before anything is sent, and the communicator stays usable."""
    x, s = quantized(torch.randn(16, 16))
    e5m2, _ = quantized(torch.randn(16, 16), E5M2)
    odd, _ = quantized(torch.randn(16, 8))
    for function in (gather, scatter, all_reduce):
        with pytest.raises((ValueError, TypeError), match=r"^scaled_.*: expected .*e5m2"):
            function(comm, e5m2, s, e5m2, algorithm=algorithm)
        with pytest.raises(ValueError, match=r"^scaled_.*: expected k to be a multiple of 16"):
            function(comm, odd, s, odd, algorithm=algorithm)
        with pytest.raises(ValueError, match=r"^scaled_.*: expected rows of out of a multiple of 16 bytes"):
            function(comm, x, s, x[:4], algorithm=algorithm)
    number, dtypes = 5, (E4M3, E4M3)
    gather_rank(comm, algorithm, number, (3, 16), 0, torch.float32, dtypes)
    scatter_rank(comm, algorithm, number, (4, 16), 0, "sum", torch.float32, dtypes)
    all_reduce_rank(comm, algorithm, number, (3, 16), "sum", torch.float32, dtypes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sizes_that_no_product_takes(algorithm):
    on_ranks(sizes_rank, 2, algorithm)
