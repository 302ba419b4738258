"""Layers on 8-bit floats with scales of blocks, compared with fp64 products of the quantized operands, each
quantized along its inner dimension."""

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from float8_cases import E4M3, E5M2, Matrix, part

from torch_overlap import nn as tnn
from torch_overlap import quantize as q
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3]
ALGORITHMS = ["auto", "sequential", "pipelined", "p2p", "bulk"]
# Rows of a rank that are whole blocks, or are not, along any dimension. "block" needs multiples of eight rows.
LAYOUTS = [(True, (96, 2), 0), (True, (48, 3), 0), (True, (2, 48, 2), 1), (True, (8, 6), -2), (False, (4, 8), 0),
           (False, (40,), 0)]  # fmt: skip
UNEVEN = [(True, (6, 3), 0), (True, (2, 6), -2), (False, (18,), 0)]
CASES = [*(("mxfp8", *layout) for layout in LAYOUTS + UNEVEN), *(("block", *layout) for layout in LAYOUTS)]
EACH = {"size": SIZES, "bias": [False, True], "scaling,sequence_parallel,rows,dim": CASES}
MODES = {"mxfp8": (Mode.MXFP8_1D_SCALING,) * 2, "block": (Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING)}
BLOCK = {"mxfp8": 32, "block": 128}


def values(x, dtype, mode):
    """Returns the dequantized blocks of x along its last dimension, with the error of a sum in fp32."""
    value = q.quantize(x.float(), mode, dtype).dequantize().double()
    return Matrix(value, value.abs() * 2**-20)


class Expected:
    """Products of a layer, on whole matrices."""

    def __init__(self, scaling, dim, ranks, backward_dtype=None):
        self.of_rows, self.of_weights = MODES[scaling]
        self.block, self.dim, self.ranks = BLOCK[scaling], dim, ranks
        self.backward_dtype = backward_dtype or E4M3

    def columns(self, x, dtype):
        """Returns the quantized transpose of the rows: `dim` varies slowest, and each rank's rows are padded to
        blocks."""
        rows = (x if self.dim is None else x.movedim(self.dim, 0)).flatten(0, -2)
        parts = rows.chunk(1 if self.dim is None else self.ranks)
        filled = [F.pad(one, (0, 0, 0, -one.size(0) % self.block)) for one in parts]
        return values(torch.cat(filled).t().contiguous(), dtype, self.of_rows)

    def sum_of_parts(self, x, weight, parts, dtype):
        """Returns x weight, with the features split into `parts`; blocks start at the beginning of each part."""
        total = None
        for one, w in zip(x.split(parts, -1), weight.split(parts), strict=True):
            part = values(one, dtype, self.of_rows).flat() @ values(w.t().contiguous(), E4M3, self.of_weights).t()
            total = part if total is None else Matrix(total.value + part.value, total.error + part.error)
        return total

    def __call__(self, x, weights, bias, grad, parts):
        """Returns the output and the gradients of x and weight. parts: outputs of each weight, on each rank one
        after the other."""
        weight = torch.cat(weights)
        rows = values(x, E4M3, self.of_rows).flat()
        products = [rows @ values(w, E4M3, self.of_weights).t() for w in weights]
        y = Matrix(torch.cat([p.value for p in products], -1), torch.cat([p.error for p in products], -1))
        if bias is not None:
            y.value = y.value + bias.double()
        dx = self.sum_of_parts(grad, weight, parts, self.backward_dtype)
        return y, dx, self.columns(grad, self.backward_dtype) @ self.columns(x, E4M3).t()


def check(got, want, like, cut):
    """Checks that `got` is this rank's part of `want`, in the shape of `like`, within the error of the sums."""
    value, most = (cut(t.reshape(like.shape)) for t in (want.value, want.error))
    excess = (got.double() - value).abs() - most - 2**-22 * value.abs()
    assert excess.max().item() <= 1e-12 * value.abs().max().item()


def uneven(data, *shape):
    """Returns magnitudes that differ from row to row and from column to column, so that a misplaced scale is
    detected."""
    x = data(*shape)
    for dim in (-1, -2) if len(shape) > 1 else ():
        sizes = [n if i == dim % len(shape) else 1 for i, n in enumerate(shape)]
        x = x * 2.0 ** torch.randint(-4, 5, sizes, generator=data.generator)
    return x


def linear(data, inputs, outputs, bias):
    layer = data.linear(inputs, outputs, bias)
    layer.weight.data = uneven(data, outputs, inputs)
    return layer


@covering(EACH | {"features": [[192], [192, 480]], "keep": [False, True]})
def test_column(problem, seed, size, features, bias, keep, scaling, sequence_parallel, rows, dim):
    """Each rank has its weights in blocks of their own."""
    inputs = 160  # not whole blocks of 128
    data = problem(seed, torch.float32)
    row_dim = dim if sequence_parallel else None
    x, grads = uneven(data, *rows, inputs), [uneven(data, *rows, n * size) for n in features]
    linears = [linear(data, inputs, n * size, bias) for n in features]
    every = [n for n in features for _ in range(size)]  # the parts of all ranks
    weights = [part for m in linears for part in m.weight.detach().chunk(size)]
    whole_bias = torch.cat([m.bias.detach() for m in linears]) if bias else None
    grad = torch.cat(grads, -1)
    y, dx, dw = Expected(scaling, row_dim, size)(x, weights, whole_bias, grad, every)
    weight = torch.cat(weights)

    def rank(comm):
        layer = tnn.ColumnParallelLinear.from_linear(linears, comm, sequence_parallel=sequence_parallel, gather_dim=dim,
                                                     keep_gathered=keep, fp8=tnn.Float8Recipe(scaling))  # fmt: skip

        def own(dim):
            wholes = [n * size for n in features]
            return lambda t: torch.cat([part(one, dim, comm) for one in t.split(wholes, dim)], dim)

        for algorithm in ALGORITHMS:
            layer.algorithm = algorithm
            layer.zero_grad()
            mine = part(x, row_dim, comm).clone().requires_grad_()
            outputs = layer(mine)
            torch.autograd.backward(outputs, [part(g, -1, comm) for g in grads])
            check(torch.cat(outputs, -1).detach(), y, grad, own(-1))
            check(mine.grad, dx, x, lambda t: part(t, row_dim, comm))
            check(torch.cat([w.grad for w in layer.weights]), dw, weight, own(0))
            if bias:
                want = own(0)(grad.double().flatten(0, -2).sum(0))
                torch.testing.assert_close(torch.cat([b.grad for b in layer.biases]).double(), want, rtol=1e-5,
                                           atol=1e-4 * grad.abs().max().item())  # fmt: skip

    run_ranks(rank, size, backend="local")


@covering(EACH | {"backward_dtype": [None, E5M2]})
def test_row(problem, seed, size, bias, backward_dtype, scaling, sequence_parallel, rows, dim):
    inputs, outputs = 160, 96  # of a rank; of all ranks
    data = problem(seed, torch.float32)
    whole = linear(data, inputs * size, outputs, bias)
    x, grad = uneven(data, *rows, inputs * size), uneven(data, *rows, outputs)
    row_dim = dim if sequence_parallel else None
    weight = whole.weight.detach()
    expected = Expected(scaling, row_dim, size, backward_dtype)
    parts = [expected(one, [w.contiguous()], None, grad, [outputs])
             for one, w in zip(x.chunk(size, -1), weight.chunk(size, 1), strict=True)]  # fmt: skip
    y = Matrix(sum(p[0].value for p in parts) + (whole.bias.detach().double() if bias else 0),
               sum(p[0].error for p in parts))  # fmt: skip

    def rank(comm):
        layer = tnn.RowParallelLinear.from_linear(
            whole, comm, sequence_parallel=sequence_parallel, scatter_dim=dim,
            fp8=tnn.Float8Recipe(scaling, backward_dtype=backward_dtype),
        )  # fmt: skip
        _, dx, dw = parts[comm.get_rank()]
        for algorithm in ALGORITHMS:
            layer.algorithm = algorithm
            layer.zero_grad()
            mine = part(x, -1, comm).clone().requires_grad_()
            output = layer(mine)
            output.backward(part(grad, row_dim, comm))
            check(output.detach(), y, grad, lambda t: part(t, row_dim, comm))
            check(mine.grad, dx, mine, lambda t: t)
            check(layer.weight.grad, dw, layer.weight, lambda t: t)

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rows_that_blocks_do_not_take_are_refused(problem, seed, sequence_parallel):
    data = problem(seed, torch.float32)
    up, down = linear(data, 64, 64, False), linear(data, 64, 64, False)

    def rank(comm):
        options = {"sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe("block")}
        for cls, whole, rows in ((tnn.ColumnParallelLinear, up, 12),
                                 (tnn.RowParallelLinear, down, 24 if sequence_parallel else 12)):  # fmt: skip
            layer = cls.from_linear(whole, comm, **options)
            message = f"^{cls.__name__}: expected rows of a rank divisible by 8 with block, got 12, .*; pad it"
            with pytest.raises(ValueError, match=message):
                layer(torch.ones(rows, layer.weight.size(1)))

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("scaling", ["current", "delayed", "mxfp8", "block"])
def test_no_rows(problem, seed, scaling):
    whole = linear(problem(seed, torch.float32), 64, 128, True)

    def rank(comm):
        layer = tnn.ColumnParallelLinear.from_linear(whole, comm, fp8=tnn.Float8Recipe(scaling))
        y = layer(torch.ones(0, 64, requires_grad=True))
        assert y.shape == (0, 64)
        y.sum().backward()
        assert not layer.weight.grad.any()

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("scaling", ["mxfp8", "block"])
def test_a_nan_stays_in_its_row(problem, seed, scaling):
    whole = linear(problem(seed, torch.float32), 64, 128, True)

    def rank(comm):
        layer = tnn.ColumnParallelLinear.from_linear(whole, comm, fp8=tnn.Float8Recipe(scaling))
        x = torch.ones(32, 64)
        x[3, 40] = float("nan")
        found = layer(x).isnan()
        assert found.any(1).nonzero().flatten().tolist() == [3, 35]
        assert found[[3, 35]].all()

    run_ranks(rank, 2, backend="local")
