"""Fused products of 8-bit floats with scales of blocks, the gathered scales, and explain() of both."""

import pytest
import torch
import torch.nn.functional as F
from fused_cases import Data, on_ranks
from test_scaled import E4M3, check

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
ALGORITHMS = ["sequential", "pipelined", "p2p", "auto"]
BLOCKS = [Mode.MXFP8_1D_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING, Mode.ROW_SCALING]
K = 256


def of_rows(mode):
    return Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode


def quantized(x, mode):
    data, scale_inv, *_ = ops.quantize(x, mode, E4M3)
    return data, scale_inv


def value(data, scale_inv, mode):
    return ops.dequantize(data, scale_inv, mode).double()


def rows_of(data, *shape):
    """Returns magnitudes that differ from row to row, so that a misplaced scale is detected."""
    sizes = torch.randint(-6, 6, (*shape[:-1], 1), generator=data.gen)
    return data(*shape) * 2.0**sizes


def gather_rank(comm, algorithm, number, mode, shape, dim):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    parts = [quantized(rows_of(data, *shape), of_rows(mode)) for _ in range(size)]
    weights = [quantized(data(n, K), mode) for n in (16, 32)]
    bias = data(32)
    values = torch.cat([value(*part, of_rows(mode)) for part in parts], dim)
    for keep in (False, True):
        results, gathered, scales = ops.scaled_all_gather_matmul(
            *parts[me], [w for w, _ in weights], [s for _, s in weights], comm, [None, bias],
            gather_dim=dim, out_dtype=torch.float32, algorithm=algorithm, scaling_mode=mode, return_gathered=keep,
        )  # fmt: skip
        for result, weight, added in zip(results, weights, (None, bias.double()), strict=True):
            check(result, F.linear(values, value(*weight, mode), added), torch.float32)
        if not keep:
            assert gathered.shape == scales.shape == (0,)
            continue
        want = torch.cat([part.view(torch.uint8) for part, _ in parts], dim)
        assert gathered.dtype == E4M3
        assert torch.equal(gathered.view(torch.uint8), want)
        # The returned scales are those of the gathered x.
        assert torch.equal(value(gathered, scales, of_rows(mode)), values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("size", "shape", "dim"), [(2, (8, K), 0), (3, (2, 8, K), 1), (3, (4, 2, K), 0)])
def test_all_gather_with_scales(algorithm, mode, size, shape, dim, seed):
    on_ranks(gather_rank, size, algorithm, seed, mode, shape, dim)


def scatter_rank(comm, algorithm, number, mode, shape, dim, op):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    xs = [quantized(rows_of(data, *shape), of_rows(mode)) for _ in range(size)]
    weights = [quantized(data(16, K), mode) for _ in range(size)]
    bias = data(16)
    total = sum(F.linear(value(*x, of_rows(mode)), value(*w, mode)) for x, w in zip(xs, weights, strict=True))
    part = (total / size if op == "avg" else total).chunk(size, dim)[me]
    result = ops.scaled_matmul_reduce_scatter(
        *xs[me], *weights[me], comm, bias, scatter_dim=dim, op=op, out_dtype=torch.float32, algorithm=algorithm,
        scaling_mode=mode,
    )  # fmt: skip
    check(result, part + bias.double(), torch.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("size", "shape", "dim", "op"), [(2, (16, K), 0, "sum"), (3, (8, 6, K), 1, "avg")])
def test_reduce_scatter_with_scales(algorithm, mode, size, shape, dim, op, seed):
    on_ranks(scatter_rank, size, algorithm, seed, mode, shape, dim, op)


def all_reduce_rank(comm, algorithm, number, mode, shape, op):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, torch.float32)
    xs = [quantized(rows_of(data, *shape), of_rows(mode)) for _ in range(size)]
    weights = [quantized(data(16, K), mode) for _ in range(size)]
    bias = data(16)
    total = sum(F.linear(value(*x, of_rows(mode)), value(*w, mode)) for x, w in zip(xs, weights, strict=True))
    result = ops.scaled_matmul_all_reduce(
        *xs[me], *weights[me], comm, bias, op=op, out_dtype=torch.float32, algorithm=algorithm, scaling_mode=mode
    )
    check(result, (total / size if op == "avg" else total) + bias.double(), torch.float32)


# Blocks of 128 need multiples of eight rows: 40 rows are five such groups, which pieces and ranks share unevenly; 8
# rows have fewer groups than there are ranks.
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("size", "shape", "op"), [(2, (40, K), "sum"), (3, (8, K), "avg"), (3, (2, 20, K), "sum")])
def test_all_reduce_with_scales(algorithm, mode, size, shape, op, seed):
    on_ranks(all_reduce_rank, size, algorithm, seed, mode, shape, op)


def kept_rank(comm, algorithm, number):
    """One factor for the tensor: only data is gathered."""
    data = Data(number, torch.float32)
    x, x_scale = quantized(data(comm.get_size(), 2, 8, 32), Mode.CURRENT_TENSOR_SCALING)
    w, w_scale = quantized(data(16, 32), Mode.CURRENT_TENSOR_SCALING)
    me = comm.get_rank()
    _, gathered, scales = ops.scaled_all_gather_matmul(
        x[me], x_scale, [w], [w_scale], comm, gather_dim=1, algorithm=algorithm, return_gathered=True
    )
    assert scales.shape == (0,)
    assert torch.equal(gathered.view(torch.uint8), torch.cat(list(x.view(torch.uint8)), 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_return_gathered(algorithm, seed):
    on_ranks(kept_rank, 3, algorithm, seed)


def errors_rank(comm):
    mode = Mode.MXFP8_1D_SCALING
    x, x_scale = quantized(torch.randn(8, K), mode)
    w, w_scale = quantized(torch.randn(16, K), mode)

    def gather(scale, weight_scale=w_scale, mode=mode):
        ops.scaled_all_gather_matmul(x, scale, [w], [weight_scale], comm, scaling_mode=mode)

    swizzled = ops.swizzle_scales(x_scale)
    with pytest.raises(ValueError, match=r"^scaled_.*: expected scale_inv of shape \[8, 8\].*unswizzle_scales"):
        gather(swizzled)
    with pytest.raises(ValueError, match=r"^scaled_.*the scales of weights\[0\]. Pass what quantize gave"):
        gather(x_scale, ops.swizzle_scales(w_scale))
    with pytest.raises(TypeError, match=r"expected scale_inv of dtype torch\.float8_e8m0fnu"):
        gather(torch.ones(1))
    with pytest.raises(ValueError, match="a scaling_mode of 8-bit values, got NO_SCALING; use all_gather_matmul"):
        gather(x_scale, mode=Mode.NO_SCALING)
    mode = Mode.BLOCK_1D_SCALING
    part, weight = quantized(torch.randn(4, K), mode), quantized(torch.randn(16, K), mode)
    with pytest.raises(ValueError, match="expected m and n to be multiples of 8 for block scaling, got 4 and 16"):
        ops.scaled_all_gather_matmul(*part, [weight[0]], [weight[1]], comm, scaling_mode=mode)
    with pytest.raises(ValueError, match="expected m and n to be multiples of 8 for block scaling, got 4 and 16"):
        ops.scaled_matmul_all_reduce(*part, *weight, comm, scaling_mode=mode, algorithm="p2p")
    gather(ops.unswizzle_scales(swizzled, 8, K // 32))


def test_scales_that_do_not_fit():
    run_ranks(errors_rank, 2, backend="local")


def without_scales_rank(comm):
    x, w, other = torch.ones(8, 32).to(E4M3), torch.ones(16, 32).to(E4M3), torch.ones(4, 4)
    for op, arguments, more in (
        ("all_gather_matmul", ([w], comm), {}),
        ("matmul_reduce_scatter", (w, comm), {}),
        ("matmul_all_reduce", (w, comm), {}),
        ("bulk_overlap_matmul", (w, other, comm), {"collective": "all_gather"}),
        ("matmul_all_to_all", ([w], comm), {}),
        ("all_to_all_matmul", (torch.ones(16, 64).to(E4M3), comm), {}),
    ):
        for rows in (x, x.to("meta")):
            given = [[a.to(rows.device) for a in v] if isinstance(v, list) else v for v in arguments]
            given = [v.to(rows.device) if isinstance(v, torch.Tensor) else v for v in given]
            message = rf"^{op}: expected x of numbers without scales, got torch.float8.*scales"
            with pytest.raises(TypeError, match=message):
                getattr(ops, op)(rows, *given, **more)


def test_8_bit_values_without_scales_are_no_numbers():
    run_ranks(without_scales_rank, 2)


def explain_rank(comm):
    def meta(*shape):
        return torch.empty(*shape, dtype=E4M3, device="meta")

    one = torch.empty(1, device="meta")
    gather = (meta(512, 32), one, [meta(16, 32)], [one], comm)
    scatter = (meta(1024, 32), one, meta(16, 32), one, comm)
    for op, given in (
        ("scaled_all_gather_matmul", gather),
        ("scaled_matmul_reduce_scatter", scatter),
        ("scaled_matmul_all_reduce", scatter),
    ):
        found = to.explain(op, *given)
        assert (found.algorithm, found.decided_by) == ("pipelined", "rule")
        assert str(found) == f"{op}: pipelined (a CPU)"
        assert to.explain(op, *given, algorithm="p2p").algorithm == "p2p"
        assert to.explain(op, *given, algorithm="sequential").decided_by == "caller"
        small = (given[0][:8], *given[1:])
        assert to.explain(op, *small).algorithm == "sequential"
        for algorithm in ("tree", "bulk"):
            with pytest.raises(ValueError, match=f"algorithm to be one of .*, got '{algorithm}'"):
                to.explain(op, *given, algorithm=algorithm)


def test_explain():
    run_ranks(explain_rank, 2)
