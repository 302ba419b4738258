"""all_reduce and product followed by a residual, an RMSNorm and its quantization: the bits of the single operators."""

import math

import pytest
import torch
from fused_cases import SIZES, Data, check, on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_overlap import InvalidTypeError, InvalidValueError, ops
from torch_overlap.quantize import ScalingMode
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
raw = torch.ops.torch_overlap
EPS = 1e-3
MODES = [mode for mode in ScalingMode.__members__.values() if mode != ScalingMode.NO_SCALING]


def check_quantized(results, plain, mode, scale):
    """Compares with `quantize` of the plain result, and the values themselves with it, within one step of e4m3."""
    data, scale_inv, hidden, norm = results
    wanted_norm, wanted_hidden = plain
    assert torch.equal(hidden, wanted_hidden)
    assert torch.equal(norm, wanted_norm)
    quantized = ops.quantize(wanted_norm, mode) if scale is None else ops.quantize_delayed(wanted_norm, scale)
    wanted = quantized[:2]
    assert data.dtype == torch.float8_e4m3fn
    assert torch.equal(data.view(torch.uint8), wanted[0].view(torch.uint8))
    assert scale_inv.dtype == wanted[1].dtype
    assert scale_inv.stride() == wanted[1].stride()
    assert torch.equal(scale_inv.float(), wanted[1].float())
    if norm.numel():
        values = ops.dequantize(data, scale_inv, mode, torch.float64)
        # A scale that is given may be too large.
        largest = math.inf if scale is None else torch.finfo(data.dtype).max / scale.item()
        expected = norm.double().clamp(-largest, largest)
        torch.testing.assert_close(values, expected, rtol=2**-4, atol=expected.abs().max().item() * 2**-9)


def quantize_rank(comm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    residual, weight, bias = data(*shape), data(shape[-1]), data(shape[-1])
    kept = [t.clone() for t in (xs[me], residual)]
    for mode in MODES:
        if mode == ScalingMode.MXFP8_1D_SCALING and shape[-1] % 32:
            continue
        scale = torch.tensor([37.5]) if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
        for b in (None, bias):
            plain = ops.all_reduce_rms_norm(xs[me], residual, weight, comm, b, eps=EPS)
            results = ops.all_reduce_rms_norm_quantize(
                xs[me], residual, weight, comm, b, scaling_mode=mode, scale=scale, eps=EPS, return_norm=True
            )
            check_quantized(results, plain, mode, scale)
        *_, norm = ops.all_reduce_rms_norm_quantize(
            xs[me], residual, weight, comm, scaling_mode=mode, scale=scale, eps=EPS
        )
        assert norm.shape == (0,)
    for t, before in zip((xs[me], residual), kept, strict=True):
        assert torch.equal(t, before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 160), (0, 4), (2, 0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_reduce(size, shape, dtype, seed):
    run_ranks(quantize_rank, size, seed, shape, dtype, backend="local")


def matmul_rank(comm, algorithm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs, ws = ([data(*s) for _ in range(size)] for s in (shape, (6, shape[-1])))
    residual, gain, bias = data(*shape[:-1], 6), data(6), data(6)
    scale = torch.tensor([37.5])
    operands = (xs[me], ws[me], residual, gain, comm, bias)
    plain = ops.matmul_all_reduce_rms_norm(*operands, eps=EPS, algorithm=algorithm)
    for mode in (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.ROW_SCALING, ScalingMode.BLOCK_1D_SCALING):
        given = scale if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
        results = ops.matmul_all_reduce_rms_norm_quantize(
            *operands, scaling_mode=mode, scale=given, eps=EPS, return_norm=True, algorithm=algorithm
        )
        check_quantized(results, plain, mode, given)
    total = residual.double() + bias.double()
    check(plain[1], total + sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True)))


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p", "low_latency", "auto"])
@pytest.mark.parametrize("shape", [(9, 5), (2, 3, 5)])
def test_matmul(algorithm, shape, seed):
    on_ranks(matmul_rank, 3, algorithm, seed, shape, torch.bfloat16)


def dequantized(values, scale_inv, mode):
    return ops.dequantize(values, scale_inv, mode, torch.float32).double()


def next_rank(comm, number, dtype):
    """The product with the next weight: that of the values and scales which a call without it returns."""
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    for shape in ((8, 160), (2, 4, 32), (160,), (0, 32)):
        xs = [data(*shape) for _ in range(size)]
        ws = [data(shape[-1], 5) for _ in range(size)]
        ys = [data(*shape[:-1], 5) for _ in range(size)]
        residual, gain, scale, weights = (
            data(*shape),
            data(shape[-1]),
            torch.full((1,), 37.5),
            data(size, 24, shape[-1]),
        )
        for mode in MODES:
            is_block = mode in (ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING)
            if len(shape) == 1 and is_block:
                continue  # 8 rows
            of_rows = ScalingMode.BLOCK_1D_SCALING if is_block else mode
            given = scale if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
            keywords = {"scale": given, "eps": EPS}
            for float8 in (torch.float8_e4m3fn, torch.float8_e5m2):
                after, after_scale_inv = ops.quantize(weights[me], mode, dtype=float8)[:2]
                following = {"next_weight": after, "next_weight_scale_inv": after_scale_inv, "scaling_mode": mode}
                operands = [(ops.all_reduce_rms_norm_quantize, (xs[me], residual, gain, comm))]
                if len(shape) > 1:
                    product = (ys[me], ws[me], residual, gain, comm)
                    operands.append((ops.matmul_all_reduce_rms_norm_quantize, product))
                for op, args in operands:
                    values, *wanted = op(*args, scaling_mode=of_rows, **keywords)
                    out, *results = op(*args, **keywords, **following)
                    assert out.dtype == dtype
                    for got, expected in zip(results, wanted, strict=True):
                        assert got.shape == expected.shape
                        assert torch.equal(got.float(), expected.float())
                    rows = dequantized(values, wanted[0], of_rows)
                    check(out, rows @ dequantized(after, after_scale_inv, mode).t())
                    again, _, hidden, norm = op(*args, return_norm=True, **keywords, **following)
                    assert torch.equal(again, out)
                    assert torch.equal(hidden, wanted[1])
                    assert norm.shape == hidden.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_next_product(dtype, seed):
    run_ranks(next_rank, 2, seed, dtype, backend="local")


def special_rank(comm):
    for number in (float("nan"), float("inf"), -float("inf"), 0.0):
        x = torch.ones(3, 8)
        x[1] *= number
        residual, weight = torch.zeros(3, 8), torch.ones(8)
        for mode in (ScalingMode.ROW_SCALING, ScalingMode.BLOCK_1D_SCALING, ScalingMode.CURRENT_TENSOR_SCALING):
            data, scale_inv, _, norm = ops.all_reduce_rms_norm_quantize(
                x, residual, weight, comm, scaling_mode=mode, eps=EPS, return_norm=True
            )
            wanted = ops.quantize(norm, mode)
            assert torch.equal(data.view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(scale_inv.isnan(), wanted[1].isnan())
            assert data.float().isnan()[1].all() == norm.isnan()[1].all()


def test_special_values():
    run_ranks(special_rank, 2, backend="local")


def test_what_does_not_fit_is_refused():
    def rank(comm):
        x, residual, weight, scale = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6), torch.ones(1)

        def refuses(kind, match, *, weight=weight, scaling_mode=ScalingMode.ROW_SCALING, scale=None):
            with pytest.raises(kind, match=match):
                ops.all_reduce_rms_norm_quantize(x, residual, weight, comm, scaling_mode=scaling_mode, scale=scale)

        delayed = ScalingMode.DELAYED_TENSOR_SCALING
        refuses(InvalidValueError, "expected a scale for DELAYED_TENSOR_SCALING, got none", scaling_mode=delayed)
        refuses(InvalidValueError, "expected no scale for ROW_SCALING, got one", scale=scale)
        refuses(InvalidValueError, "got NO_SCALING", scaling_mode=ScalingMode.NO_SCALING)
        refuses(InvalidValueError, "all_reduce_rms_norm_quantize: expected .*, got 77", scaling_mode=77)
        refuses(InvalidTypeError, "scale of dtype float32", scaling_mode=delayed, scale=scale.double())
        refuses(InvalidValueError, "scale of one element", scaling_mode=delayed, scale=torch.ones(2))
        refuses(InvalidValueError, "multiple of 32", scaling_mode=ScalingMode.MXFP8_1D_SCALING)
        refuses(InvalidValueError, r"all_reduce_rms_norm_quantize: .*norm's weight.*6.*5", weight=weight[:5])

    run_ranks(rank, 2, backend="local")


def test_a_next_weight_that_does_not_fit_is_refused():
    def rank(comm):
        row, block = ScalingMode.ROW_SCALING, ScalingMode.BLOCK_2D_SCALING
        x, gain = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
        after, scale_inv = ops.quantize(torch.randn(8, 32), row)[:2]

        def refuses(kind, match, weight=after, scales=scale_inv, *, x=x, gain=gain, mode=row, scale=None):
            with_product = (ops.matmul_all_reduce_rms_norm_quantize, x, gain.expand(32, 32), x, gain)
            for op, *operands in ((ops.all_reduce_rms_norm_quantize, x, x, gain), with_product):
                with pytest.raises(kind, match=f"{op.__name__}: {match}"):
                    op(*operands, comm, scaling_mode=mode, scale=scale, next_weight=weight,
                       next_weight_scale_inv=scales)  # fmt: skip

        refuses(InvalidValueError, "expected next_weight and next_weight_scale_inv, got only the weight", scales=None)
        refuses(InvalidValueError, "expected next_weight and next_weight_scale_inv, got only the scales", weight=None)
        refuses(InvalidValueError, r"expected next_weight \[out_features, 32\] .* got shape \[32, 8\]", after.t())
        refuses(
            InvalidTypeError, "expected next_weight of dtype float8_e4m3fn or float8_e5m2, got torch.bfloat16", x[:4]
        )
        refuses(InvalidValueError, r"expected scale_inv of shape \[8, 1\] .* got \[4, 1\], .* next_weight",
                scales=scale_inv[:4])  # fmt: skip
        delayed, one = ScalingMode.DELAYED_TENSOR_SCALING, torch.ones(1)
        refuses(InvalidValueError, r"expected a scale of one element, got shape \[8, 1\].* the scales of next_weight",
                mode=delayed, scale=one)  # fmt: skip
        refuses(InvalidValueError, "expected a scaling_mode of 8-bit values, got NO_SCALING", mode=0)
        refuses(InvalidTypeError, "expected x of float16, bfloat16 or float32 with a next_weight", x=x.double(),
                gain=gain.double())  # fmt: skip
        refuses(
            InvalidValueError,
            "expected m and n to be multiples of 8",
            *ops.quantize(torch.randn(8, 32), block)[:2],
            mode=block,
        )

    run_ranks(rank, 2, backend="local")


def gradient_rank(comm):
    x, residual, weight = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6), torch.randn(6)
    *_, hidden, _ = ops.all_reduce_rms_norm_quantize(x, residual, weight, comm, scaling_mode=ScalingMode.ROW_SCALING)
    with pytest.raises(RuntimeError, match="all_reduce_rms_norm_quantize"):
        hidden.sum().backward()


def test_a_gradient_is_refused():
    run_ranks(gradient_rank, 2, backend="local")


# --- Tracing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_shapes_need_no_communicator(mode):
    with FakeTensorMode():
        x, residual, weight = torch.empty(2, 3, 160), torch.empty(2, 3, 160), torch.empty(160)
        scale = torch.empty(1) if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
        results = raw.all_reduce_rms_norm_quantize(x, residual, weight, None, scale, mode, "nobody", 2, 1e-5, True)
        wanted = ops.quantize(x, mode)
        y, product = torch.empty(2, 3, 8), torch.empty(160, 8)
        *of_product, norm = raw.matmul_all_reduce_rms_norm_quantize(
            y, product, None, residual, weight, scale, mode, "nobody", 2
        )
        after, after_scale_inv = ops.quantize(torch.empty(24, 160), mode)[:2]
        out, *of_next = raw.all_reduce_rms_norm_quantize(
            x, residual, weight, None, scale, mode, "nobody", 2, 1e-5, True, after, after_scale_inv
        )
        of_rows = ScalingMode.BLOCK_1D_SCALING if mode == ScalingMode.BLOCK_2D_SCALING else mode
        assert of_next[0].shape == ops.quantize(x, of_rows)[1].shape
    assert (out.shape, out.dtype) == ((2, 3, 24), torch.float32)
    assert [t.shape for t in of_next[1:]] == [(2, 3, 160)] * 2
    for data, scale_inv, hidden in (results[:3], of_product):
        assert [data.shape, scale_inv.shape, hidden.shape] == [(2, 3, 160), wanted[1].shape, (2, 3, 160)]
        assert [data.dtype, scale_inv.dtype] == [torch.float8_e4m3fn, wanted[1].dtype]
        assert scale_inv.stride() == wanted[1].stride()
    assert results[3].shape == (2, 3, 160)
    assert norm.shape == (0,)


def traced_rank(comm):
    name, size = comm.get_name(), comm.get_size()
    x, residual, weight, scale = torch.randn(4, 160), torch.randn(4, 160), torch.randn(160), torch.full((1,), 9.0)
    product = torch.randn(160, 160)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for mode in (ScalingMode.ROW_SCALING, ScalingMode.DELAYED_TENSOR_SCALING):
        given = scale if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
        operands = (x, residual, weight, None, given, mode, name, size)
        torch.library.opcheck(raw.all_reduce_rms_norm_quantize, operands, test_utils=utilities)
        operands = (*operands, 1e-6, False, *ops.quantize(product, mode)[:2])  # test_schema multiplies 8-bit floats
        torch.library.opcheck(raw.all_reduce_rms_norm_quantize, operands, test_utils=utilities[1:])
        operands = (x, product, None, residual, weight, given, mode, name, size)
        torch.library.opcheck(raw.matmul_all_reduce_rms_norm_quantize, operands, test_utils=utilities)

    def step(x, residual):
        data, scale_inv, hidden, _ = ops.all_reduce_rms_norm_quantize(
            x + 1, residual, weight, comm, scaling_mode=ScalingMode.BLOCK_1D_SCALING
        )
        return ops.dequantize(data, scale_inv, ScalingMode.BLOCK_1D_SCALING) * 2, hidden

    for got, wanted in zip(torch.compile(step, fullgraph=True)(x, residual), step(x, residual), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.inductor
def test_opcheck_and_compile():
    run_ranks(traced_rank, 2, backend="gloo", timeout=240)
