"""The operator gemm: values against float64, axis boundaries, epilogues, gradients, autocast, compilation, errors."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from rank_values import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
MXFP8, BLOCK_1D, BLOCK_2D = ScalingMode.MXFP8_1D_SCALING, ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING
CURRENT, DELAYED = ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING
SCALED = [CURRENT, DELAYED, MXFP8, BLOCK_1D]
LAYOUTS = list(itertools.product([False, True], repeat=2))
raw = torch.ops.torch_overlap.gemm
# torch cannot compare inputs before and after for 8-bit floats.
UTILITIES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(got, want, terms=1.0):
    """Checks every element to the rounding of its dtype and of a float32 sum whose terms' magnitudes add up to
    `terms`."""
    assert got.shape == want.shape, f"expected {tuple(want.shape)}, got {tuple(got.shape)}"
    sums = 1e-12 if got.dtype is torch.float64 else 1e-5
    tolerance = torch.finfo(got.dtype).eps * want.abs() + sums * terms + torch.finfo(got.dtype).smallest_normal
    wrong = ~((got.double() - want).abs() <= tolerance)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()}: {index}: got {got[index]}, expected {want[index]}"
        )


def magnitude(lhs, rhs):
    return float((lhs.double().abs() @ rhs.double().abs()).max()) + 1


def flat(tensor, boundary, transposed):
    """Returns the matrix op(tensor) in float64, by the definition."""
    boundary = boundary + tensor.dim() if boundary < 0 else boundary
    matrix = tensor.double().reshape(math.prod(tensor.shape[:boundary]), math.prod(tensor.shape[boundary:]))
    return matrix.t() if transposed else matrix


# --- without scaling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("lhs_t", "rhs_t"), LAYOUTS)
def test_layouts(dtype, lhs_t, rhs_t, data):
    lhs = data(*((40, 24) if lhs_t else (24, 40)), dtype=dtype)
    rhs = data(*((56, 40) if rhs_t else (40, 56)), dtype=dtype)
    out, *others = ops.gemm(lhs, None, rhs, None, lhs_transposed=lhs_t, rhs_transposed=rhs_t)
    left, right = flat(lhs, 1, lhs_t), flat(rhs, 1, rhs_t)
    assert out.dtype is dtype
    assert out.is_contiguous()
    check(out, left @ right, magnitude(left, right))
    assert [tuple(o.shape) for o in others] == [(0,)] * 3


BOUNDARIES = [
    # lhs shape, boundary, transposed; rhs shape, boundary, transposed; output shape
    ((2, 3, 8), 2, False, (8, 5), 1, False, (2, 3, 5)),
    ((2, 3, 8), -1, False, (8, 5), -1, False, (2, 3, 5)),
    ((3, 2, 4), 1, False, (2, 4, 5, 7), 2, False, (3, 5, 7)),
    ((3, 2, 4), -2, False, (2, 4, 5, 7), -2, False, (3, 5, 7)),
    ((2, 4, 3, 6), 2, True, (5, 2, 4), 1, True, (3, 6, 5)),
    ((2, 4, 3, 6), -2, True, (5, 7, 8), -1, True, (3, 6, 5, 7)),
    ((8,), 0, False, (8, 5), 1, False, (5,)),
    ((8,), -1, False, (8,), 1, False, ()),
    ((8,), 1, True, (8,), 1, False, ()),
    ((3,), 1, False, (5,), 0, False, (3, 5)),
    ((2, 3), 2, False, (4,), -1, False, (2, 3, 4)),
]


@pytest.mark.parametrize(("shape", "boundary", "lhs_t", "rhs_shape", "rhs_boundary", "rhs_t", "out_shape"), BOUNDARIES)
def test_axis_boundaries(shape, boundary, lhs_t, rhs_shape, rhs_boundary, rhs_t, out_shape, data):
    lhs, rhs = data(*shape), data(*rhs_shape)
    options = dict(
        lhs_axis_boundary=boundary, rhs_axis_boundary=rhs_boundary, lhs_transposed=lhs_t, rhs_transposed=rhs_t
    )
    left, right = flat(lhs, boundary, lhs_t), flat(rhs, rhs_boundary, rhs_t)
    want = (left @ right).reshape(out_shape)
    bias = data(right.shape[1])
    out, _, pre, _ = ops.gemm(lhs, None, rhs, None, bias, fuse_bias=True, fuse_gelu=True, **options)
    sums = (left @ right + bias.double()).reshape(out_shape)
    check(pre, sums, magnitude(left, right))
    check(out, F.gelu(sums, approximate="tanh"), magnitude(left, right))
    check(ops.gemm(lhs, None, rhs, None, **options)[0], want, magnitude(left, right))


@pytest.mark.parametrize("make", ["transposed", "slice", "every other", "expanded", "column", "row"])
def test_any_strides(make, data):
    lhs = {
        "transposed": lambda: data(16, 12).t(),
        "slice": lambda: data(20, 30)[4:16, 3:19],
        "every other": lambda: data(12, 32)[:, ::2],
        "expanded": lambda: data(1, 16).expand(12, 16),
        "column": lambda: data(12, 16, 3)[:, :1, 1],
        "row": lambda: data(3, 16, 2)[1:2, :, 0],
    }[make]()
    rhs = data(lhs.shape[1], 10)
    check(ops.gemm(lhs, None, rhs, None)[0], flat(lhs, 1, False) @ rhs.double(), magnitude(lhs, rhs))
    rhs_t = data(lhs.shape[0], 10)
    got = ops.gemm(rhs_t, None, lhs, None, lhs_transposed=True)[0]
    check(got, rhs_t.double().t() @ lhs.double(), magnitude(rhs_t.t(), lhs))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_sizes_of_zero(m, n, k, data):
    bias = data(n)
    out, _, pre, _ = ops.gemm(data(m, k), None, data(k, n), None, bias, fuse_bias=True, fuse_gelu=True)
    want = torch.zeros(m, n, dtype=torch.float64) + bias.double()
    check(pre, want)
    check(out, F.gelu(want, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_output(dtype, data):
    lhs, rhs, bias = data(16, 32, dtype=dtype), data(32, 8, dtype=dtype), data(8)
    out = ops.gemm(lhs, None, rhs, None, bias, fuse_bias=True, out_dtype=torch.float32)[0]
    assert out.dtype is torch.float32
    check(out, lhs.double() @ rhs.double() + bias.double(), magnitude(lhs, rhs))


# --- the backward pass's epilogues -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bias_grad_of_a_weight_gradient(dtype, data):
    """dw = dy^T x, and db, the sum of dy over tokens."""
    dy, x = data(48, 16, dtype=dtype), data(48, 24, dtype=dtype)
    dw, db, pre, aux = ops.gemm(dy, None, x, None, lhs_transposed=True, fuse_bias=True, grad=True)
    check(dw, dy.double().t() @ x.double(), magnitude(dy.t(), x))
    check(db, dy.double().sum(0), float(dy.double().abs().sum(0).max()))
    assert db.dtype is dtype
    assert pre.shape == aux.shape == (0,)


def test_bias_grad_takes_the_dtype_of_the_bias(data):
    dy, x, bias = data(48, 16, dtype=torch.bfloat16), data(48, 24, dtype=torch.bfloat16), data(16)
    db = ops.gemm(dy, None, x, None, bias, lhs_transposed=True, fuse_bias=True, grad=True)[1]
    assert db.dtype is torch.float32
    check(db, dy.double().sum(0), float(dy.double().abs().sum(0).max()))


@pytest.mark.parametrize("fuse_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gelu_backward(dtype, fuse_bias, data):
    """dh = (dy w) gelu'(h), and the gradient of the bias of h."""
    dy, w, h = data(3, 8, 16, dtype=dtype), data(16, 24, dtype=dtype), data(3, 8, 24, dtype=dtype)
    dh, db, pre, _ = ops.gemm(dy, None, w, None, None, h, fuse_gelu=True, fuse_bias=fuse_bias, grad=True)
    at = h.double().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(at, approximate="tanh").sum(), at)
    want = (dy.double() @ w.double()) * slope
    terms = 2 * magnitude(dy.flatten(0, 1), w)
    check(dh, want, terms)
    assert pre.shape == (0,)
    if fuse_bias:
        check(db, want.flatten(0, 1).sum(0), terms * 24 * (1 if dtype is torch.float64 else 100))
    else:
        assert db.shape == (0,)


# --- 8-bit operands ----------------------------------------------------------------------------------------


def quantized(x, mode, dtype=E4M3, swizzled=False):
    if mode is DELAYED:
        return ops.quantize_delayed(x, torch.full((1,), 16.0), dtype)[:2]
    return ops.quantize(x, mode, dtype, swizzled=swizzled)[:2]


def values(data8, scale_inv, mode):
    return ops.dequantize(data8, scale_inv, mode, torch.float64)


PAIRS = [*[(mode, mode) for mode in SCALED]]


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("mode", SCALED)
def test_scaled_products(mode, types, data):
    x8, xs = quantized(data(3, 16, 160), mode, types[0])
    w8, ws = quantized(data(40, 160), mode, types[1])
    bias = data(40, dtype=torch.bfloat16)
    left, right = values(x8, xs, mode).flatten(0, 1), values(w8, ws, mode).t()
    want, terms = (left @ right).view(3, 16, 40), magnitude(left, right)
    options = dict(scaling_mode=mode, rhs_transposed=True)
    out = ops.gemm(x8, xs, w8, ws, **options)[0]
    assert out.dtype is torch.bfloat16
    check(out, want, terms)
    check(ops.gemm(x8, xs, w8, ws, use_split_accumulator=True, out_dtype=torch.float32, **options)[0], want, terms)
    out, _, pre, _ = ops.gemm(x8, xs, w8, ws, bias, fuse_bias=True, fuse_gelu=True, **options)
    check(pre, want + bias.double(), terms)
    check(out, F.gelu(want + bias.double(), approximate="tanh"), terms)
    half = ops.gemm(x8, xs, w8, ws, bias.half(), fuse_bias=True, **options)[0]
    assert half.dtype is torch.float16, "the bias says the dtype"
    check(half, want + bias.half().double(), terms)


def test_weights_in_128_x_128_blocks(data):
    x8, xs = quantized(data(2, 136, 272), BLOCK_1D)
    w8, ws = quantized(data(264, 272), BLOCK_2D)
    left, right = values(x8, xs, BLOCK_1D).flatten(0, 1), values(w8, ws, BLOCK_2D).t()
    want = left @ right
    out = ops.gemm(x8, xs, w8, ws, scaling_mode=BLOCK_2D, rhs_transposed=True, out_dtype=torch.float32)[0]
    check(out.flatten(0, 1), want, magnitude(left, right))
    (out,) = ops.grouped_gemm([x8[0]], [w8], (), [xs[:136]], [ws], scaling_mode=BLOCK_2D, rhs_transposed=True)
    check(out, want[:136], magnitude(left, right))


def test_an_operand_along_k_may_be_a_transposed_view(data):
    """w8.t() is contiguous along k like w8: no copy and no columnwise data are needed."""
    x8, xs = quantized(data(32, 64), CURRENT)
    w8, ws = quantized(data(48, 64), CURRENT)
    want = ops.gemm(x8, xs, w8, ws, scaling_mode=CURRENT, rhs_transposed=True)[0]
    assert_equal(ops.gemm(x8, xs, w8.t(), ws, scaling_mode=CURRENT)[0], want)


@pytest.mark.parametrize("types", [(torch.uint8, torch.uint8), (E8M0, E8M0)])
def test_swizzled_scales_give_the_same(types, data):
    x8, xs = quantized(data(160, 192), MXFP8)
    w8, ws = quantized(data(48, 192), MXFP8)
    want = ops.gemm(x8, xs, w8, ws, scaling_mode=MXFP8, rhs_transposed=True)[0]
    xs, ws = xs.view(types[0]), ws.view(types[1])
    xb, wb = (torch.full_like(ops.swizzle_scales(s).view(torch.uint8), 7).view(s.dtype) for s in (xs, ws))
    got = ops.gemm(x8, xs, w8, ws, lhs_swizzle=xb, rhs_swizzle=wb.flatten(), scaling_mode=MXFP8, rhs_transposed=True)[0]
    assert_equal(got, want)
    assert_equal(xb.view(torch.uint8), ops.swizzle_scales(xs).view(torch.uint8))
    assert_equal(wb.view(torch.uint8), ops.swizzle_scales(ws).view(torch.uint8))
    got = ops.gemm(x8, xb, w8, wb, scaling_mode=MXFP8, rhs_transposed=True, scales_swizzled=True)[0]
    assert_equal(got, want)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_8_bit_output_and_its_amax(dtype, data):
    x8, xs = quantized(data(16, 64), CURRENT)
    w8, ws = quantized(data(32, 64), CURRENT)
    scale, amax = torch.full((1,), 4.0), torch.full((1,), math.nan)
    out = ops.gemm(
        x8, xs, w8, ws, scaling_mode=CURRENT, rhs_transposed=True, out_dtype=dtype, out_scale=scale, out_amax=amax
    )[0]
    want = values(x8, xs, CURRENT) @ values(w8, ws, CURRENT).t()
    check(out, want * 4, 1e3)
    check(amax, want.abs().max().view(1), magnitude(values(x8, xs, CURRENT), values(w8, ws, CURRENT).t()))


def test_a_workspace_of_the_caller(data):
    lhs, rhs = data(16, 32), data(32, 8)
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    assert_equal(ops.gemm(lhs, None, rhs, None, workspace=workspace)[0], ops.gemm(lhs, None, rhs, None)[0])


# --- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("lhs_t", "rhs_t"), LAYOUTS)
def test_gradients_of_any_order(lhs_t, rhs_t, gelu, data):
    lhs = data(*((2, 2, 3) if lhs_t else (3, 2, 2)), dtype=torch.float64).requires_grad_()
    rhs = data(*((5, 2, 2) if rhs_t else (2, 2, 5)), dtype=torch.float64).requires_grad_()
    bias = data(5, dtype=torch.float64).requires_grad_()

    def function(lhs, rhs, bias):
        return ops.gemm(
            lhs, None, rhs, None, bias, lhs_transposed=lhs_t, rhs_transposed=rhs_t, fuse_bias=True, fuse_gelu=gelu,
            lhs_axis_boundary=2 if lhs_t else 1, rhs_axis_boundary=1 if rhs_t else 2,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(function, (lhs, rhs, bias))
    assert torch.autograd.gradgradcheck(function, (lhs, rhs, bias))


def test_gradients_of_a_wider_output(data):
    x = data(16, 32, dtype=torch.bfloat16).requires_grad_()
    w = data(8, 32, dtype=torch.bfloat16).requires_grad_()
    dy = data(16, 8)
    out = ops.gemm(x, None, w, None, rhs_transposed=True, out_dtype=torch.float32)[0]
    dx, dw = torch.autograd.grad(out, (x, w), dy)
    dy = dy.bfloat16()
    check(dx, dy.double() @ w.double(), magnitude(dy, w))
    check(dw, dy.double().t() @ x.double(), magnitude(dy.t(), x))


def test_no_gradient_of_what_has_none(data):
    bias = data(8, dtype=torch.bfloat16).requires_grad_()
    x8, xs = quantized(data(16, 32), CURRENT)
    w8, ws = quantized(data(8, 32), CURRENT)
    out = ops.gemm(x8, xs, w8, ws, bias, fuse_bias=True, scaling_mode=CURRENT, rhs_transposed=True)[0]
    with pytest.raises(RuntimeError, match=r"^gemm: expected operands of NO_SCALING, .* where a gradient is asked"):
        out.sum().backward()
    x = data(8, 8).requires_grad_()
    out, db, *_ = ops.gemm(x, None, data(8, 8), None, fuse_bias=True, grad=True)
    assert not db.requires_grad
    with pytest.raises(RuntimeError, match="where a gradient is asked"):
        out.sum().backward()


# --- autocast, compilation, opcheck ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, data):
    x, w, b, h = data(16, 32), data(16, 32), data(16), data(16, 16)
    with torch.autocast("cpu", dtype):
        out, _, pre, _ = ops.gemm(x, None, w, None, b, rhs_transposed=True, fuse_bias=True, fuse_gelu=True)
        back = ops.gemm(x, None, w.to(dtype), None, None, h, rhs_transposed=True, fuse_gelu=True, grad=True)[0]
        x8, xs = quantized(x, CURRENT)
        scaled = ops.gemm(x8, xs, x8, xs, scaling_mode=CURRENT, rhs_transposed=True)[0]
        asked = ops.gemm(x8, xs, x8, xs, scaling_mode=CURRENT, rhs_transposed=True, out_dtype=torch.float32)[0]
    assert out.dtype is pre.dtype is back.dtype is scaled.dtype is dtype
    assert asked.dtype is torch.float32
    cast = [t.to(dtype) for t in (x, w, b, h)]
    assert_equal(
        out, ops.gemm(cast[0], None, cast[1], None, cast[2], rhs_transposed=True, fuse_bias=True, fuse_gelu=True)[0]
    )
    want = ops.gemm(cast[0], None, cast[1], None, None, cast[3], rhs_transposed=True, fuse_gelu=True, grad=True)[0]
    assert_equal(back, want)


def test_gradients_under_autocast_have_the_dtype_of_the_parameters(data):
    w, b = data(8, 32).requires_grad_(), data(8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.gemm(data(16, 32), None, w, None, b, rhs_transposed=True, fuse_bias=True)[0]
    out.sum().backward()
    assert w.grad.dtype is b.grad.dtype is torch.float32
    check(b.grad, torch.full((8,), 16.0, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled(backend, data):
    def step(x, w, b, x8, xs, w8, ws, xs_bytes, ws_bytes, buffer, amax):
        y, _, pre, _ = ops.gemm(x, None, w, None, b, rhs_transposed=True, fuse_bias=True, fuse_gelu=True)
        z = ops.gemm(
            x8, xs_bytes, w8, ws_bytes, scaling_mode=MXFP8, rhs_transposed=True, lhs_swizzle=buffer, out_dtype=E4M3,
            out_scale=torch.ones(1), out_amax=amax,
        )[0]  # fmt: skip
        v = ops.gemm(x8, xs, w8, ws, scaling_mode=MXFP8, rhs_transposed=True)[0]
        return y.double().sum(), pre.detach(), z, v, amax + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in (16, 48):
        w, b = data(32, 64).requires_grad_(), data(32).requires_grad_()
        x, (x8, xs), (w8, ws) = data(2, rows, 64), quantized(data(rows, 64), MXFP8), quantized(data(32, 64), MXFP8)
        as_bytes = xs.view(torch.uint8), ws.view(torch.uint8)
        results = []
        for function in (step, compiled):
            buffer, amax = torch.zeros_like(ops.swizzle_scales(xs).view(torch.uint8)), torch.zeros(1)
            loss, pre, z, v, more = function(x, w, b, x8, xs, w8, ws, *as_bytes, buffer, amax)
            grads = torch.autograd.grad(loss, (w, b))
            results.append((loss.detach(), pre, z, v, more, buffer, amax, *grads))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got.float(), want.float())


def test_opcheck(data):
    def variants():
        x, w, b = data(3, 4, 16), data(8, 16), data(8)
        yield (x, None, w, None), {"rhs_transposed": True}
        yield (x, None, w, None, b), {"rhs_transposed": True, "fuse_bias": True, "fuse_gelu": True}
        yield (x, None, w.t(), None), {"out_dtype": torch.float32}
        yield (x, None, x, None), {"lhs_axis_boundary": 2, "rhs_axis_boundary": 2, "lhs_transposed": True}
        yield (x, None, x, None), {"lhs_transposed": True, "lhs_axis_boundary": 2, "rhs_axis_boundary": 2,
                                   "fuse_bias": True, "grad": True}  # fmt: skip
        yield (x, None, w, None, None, data(3, 4, 8)), {"rhs_transposed": True, "fuse_gelu": True, "grad": True}
        yield (x, None, w, None), {"rhs_transposed": True, "workspace": torch.zeros(512, dtype=torch.uint8)}

    for arguments, options in variants():
        overload = raw.buffers if "workspace" in options else raw.default
        torch.library.opcheck(overload, arguments, options)
    x, w, b = data(3, 4, 16).requires_grad_(), data(8, 16).requires_grad_(), data(8).requires_grad_()
    for gelu in (False, True):
        options = {"rhs_transposed": True, "fuse_bias": True, "fuse_gelu": gelu}
        torch.library.opcheck(raw.default, (x, None, w, None, b), options)


@pytest.mark.parametrize("mode", SCALED)
def test_opcheck_of_8_bit_operands(mode, data):
    x8, xs = quantized(data(32, 64), mode)
    w8, ws = quantized(data(16, 64), mode)
    options = {"scaling_mode": int(mode), "rhs_transposed": True}
    torch.library.opcheck(raw.default, (x8, xs, w8, ws), options, test_utils=UTILITIES)
    options |= {"out_dtype": E4M3, "out_scale": torch.ones(1)}
    torch.library.opcheck(raw.default, (x8, xs, w8, ws), options, test_utils=UTILITIES)
    options |= {"out_amax": torch.zeros(1)}
    torch.library.opcheck(raw.buffers, (x8, xs, w8, ws), options, test_utils=UTILITIES)
    if mode is MXFP8:
        buffer = torch.zeros_like(ops.swizzle_scales(xs))
        torch.library.opcheck(raw.buffers, (x8, xs, w8, ws), {**options, "lhs_swizzle": buffer}, test_utils=UTILITIES)


@pytest.mark.parametrize("how", ["meta", "fake"])
def test_shapes_without_data(how):
    with FakeTensorMode() if how == "fake" else torch.device("meta"):
        x, w, b = torch.empty(2, 3, 8), torch.empty(5, 8), torch.empty(5)
        out, db, pre, aux = ops.gemm(x, None, w, None, b, rhs_transposed=True, fuse_bias=True, fuse_gelu=True)
        assert (out.shape, db.shape, pre.shape, aux.shape) == ((2, 3, 5), (0,), (2, 3, 5), (0,))
        x8, one = torch.empty(2, 3, 16, dtype=E4M3), torch.ones(1)
        out = ops.gemm(x8, one, x8[0], one, scaling_mode=CURRENT, rhs_transposed=True)[0]
        assert (out.shape, out.dtype) == ((2, 3, 3), torch.bfloat16)


# --- errors ------------------------------------------------------------------------------------------------


def f32(*shape):
    return torch.ones(shape)


def f8(*shape, dtype=E4M3):
    return torch.ones(shape).to(dtype)


def call(lhs, rhs, lhs_scale_inv=None, rhs_scale_inv=None, bias=None, gelu_input=None, aux_in=None, **options):
    return lambda: ops.gemm(lhs(), made(lhs_scale_inv), rhs(), made(rhs_scale_inv), made(bias), made(gelu_input),
                            made(aux_in), **{k: made(v) if callable(v) else v for k, v in options.items()})  # fmt: skip


def made(value):
    return value() if callable(value) else value


def plain(**options):
    return call(lambda: f32(4, 8), lambda: f32(8, 6), **options)


def scaled(mode=CURRENT, scale=lambda: f32(1), **options):
    return call(lambda: f8(16, 32), lambda: f8(16, 32), scale, scale, scaling_mode=mode, rhs_transposed=True, **options)


VALUE, TYPE, UNSUPPORTED = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError
E8 = torch.float8_e8m0fnu
# Also on Meta tensors.
ERRORS = [
    (call(lambda: f32(4, 8), lambda: f32(7, 6)), VALUE, "as many contracted elements in rhs as in lhs, 8, got 7"),
    (call(lambda: f32(4, 8), lambda: f32(8, 6).bfloat16()), TYPE, "rhs of dtype torch.float32 as lhs, got torch.bf"),
    (call(lambda: f32(4, 8).int(), lambda: f32(8, 6)), TYPE, "expected lhs of dtype float32.*got torch.int32"),
    (call(lambda: f8(4, 8), lambda: f8(8, 6)), TYPE, "expected lhs of dtype float32.*8-bit values"),
    (plain(lhs_scale_inv=lambda: f32(1)), VALUE, "expected no lhs_scale_inv for NO_SCALING, got one"),
    (plain(scaling_mode=3, lhs_scale_inv=lambda: f32(1)), TYPE, "expected lhs of dtype float8.*got torch.float32"),
    (plain(scaling_mode=9), VALUE, "expected a scaling mode, got 9"),
    (scaled(scale=None), VALUE, "expected lhs_scale_inv.*Missing inverse scaling factor"),
    (plain(lhs_axis_boundary=3), VALUE, r"expected lhs_axis_boundary in \[-2, 2\], got 3"),
    (plain(rhs_axis_boundary=-3), VALUE, r"expected rhs_axis_boundary in \[-2, 2\], got -3"),
    (call(lambda: torch.ones(()), lambda: f32(8, 6)), VALUE, "expected lhs of one or more dimensions, got a scalar"),
    (plain(fuse_bias=True), VALUE, "expected a bias for fuse_bias, got none"),
    (plain(bias=lambda: f32(6)), VALUE, "expected fuse_bias where a bias is given"),
    (plain(bias=lambda: f32(5), fuse_bias=True), VALUE, "as many bias entries as columns of the output, 6, got 5"),
    (plain(fuse_gelu=True, grad=True), VALUE, "expected gelu_input for fuse_gelu with grad, got none"),
    (plain(gelu_input=lambda: f32(4, 6)), VALUE, "expected fuse_gelu and grad where gelu_input is given"),
    (plain(gelu_input=lambda: f32(4, 5), fuse_gelu=True, grad=True), VALUE,
     r"as many elements of gelu_input as of the output \(Missing operand-output aliasing\), 24, got 20"),
    (plain(bias=lambda: f32(5), fuse_bias=True, grad=True), VALUE,
     r"as many bias entries as bias_grad has \(Missing operand-output aliasing\), 4, got 5"),
    (plain(bias=lambda: f32(4), fuse_bias=True, fuse_gelu=True, gelu_input=lambda: f32(4, 6), grad=True), VALUE,
     r"as many bias entries as bias_grad has \(Missing operand-output aliasing\), 6, got 4"),
    (plain(aux_in=lambda: f32(4, 8)), VALUE, "expected no aux_in for comm_type NONE"),
    (plain(comm_overlap_method=1), VALUE, "expected comm_overlap_method NONE"),
    (plain(comm_overlap_id=7), VALUE, "expected no comm_overlap_id for comm_type NONE.*got 7; pass comm_type"),
    (plain(comm_type=1, comm_overlap_method=3), VALUE, "expected comm_overlap_id to be the id of a live buffer, got 0"),
    (plain(comm_type=2, comm_overlap_method=1), VALUE, "expected comm_overlap_id to be the id of a live buffer, got 0"),
    (plain(comm_type=3), VALUE, "an invalid collective type"),
    (plain(lhs_swizzle=lambda: f8(128, 4, dtype=E8)), VALUE, "expected no lhs_swizzle for NO_SCALING, got one"),
    (scaled(rhs_swizzle=lambda: f8(128, 4, dtype=E8)), VALUE, "expected no rhs_swizzle for CURRENT_TENSOR_SCALING"),
    (scaled(MXFP8, lambda: f8(16, 1, dtype=E8), lhs_swizzle=lambda: f8(128, 8, dtype=E8)), VALUE,
     "lhs_swizzle of as many elements as the padded scales, 512, got 1024"),
    (scaled(MXFP8, lambda: f8(16, 1, dtype=E8), rhs_swizzle=lambda: f8(0, dtype=E8)), VALUE,
     "Missing swizzled inverse scale buffer: expected rhs_swizzle of 512 elements, got an empty one"),
    (scaled(MXFP8, lambda: f8(16, 1, dtype=E8), lhs_swizzle=lambda: f32(128, 4)), TYPE,
     "expected lhs_swizzle of dtype float8_e8m0fnu or uint8"),
    (scaled(MXFP8, lambda: f8(16, 1, dtype=E8), lhs_swizzle=lambda: f8(4, 128, dtype=E8).t()), VALUE,
     "expected lhs_swizzle contiguous"),
    (scaled(MXFP8, lambda: f8(128, 4, dtype=E8), lhs_swizzle=lambda: f8(128, 4, dtype=E8), scales_swizzled=True), VALUE,
     "expected no lhs_swizzle for MXFP8_1D_SCALING with scales_swizzled"),
    (plain(out_dtype=torch.int32), TYPE, "expected out_dtype"),
    (plain(out_dtype=torch.bfloat16), TYPE, "expected out_dtype"),
    (scaled(out_dtype=torch.float64), TYPE, "expected out_dtype"),
]  # fmt: skip
# Errors of the GEMM layer, which depend on data.
LAYER_ERRORS = [
    (call(lambda: f8(32, 16), lambda: f8(16, 32), lambda: f32(1), lambda: f32(1), scaling_mode=CURRENT,
          rhs_transposed=True, lhs_transposed=True), VALUE, "missing column-wise usage"),
    (call(lambda: f8(16, 24), lambda: f8(16, 24), lambda: f32(1), lambda: f32(1), scaling_mode=CURRENT,
          rhs_transposed=True), VALUE, "multiple of 16"),
    (call(lambda: f8(16, 32, dtype=E5M2), lambda: f8(16, 32, dtype=E5M2), lambda: f32(1), lambda: f32(1),
          scaling_mode=CURRENT, rhs_transposed=True), TYPE, "float8_e5m2 on both"),
    (scaled(BLOCK_2D, lambda: f32(1, 1)), VALUE, r"lhs for BLOCK_1D_SCALING of shape \[16, 1\]"),
    (scaled(scale=lambda: f32(2)), VALUE, "of one element"),
    (scaled(scale=lambda: f32(1).half()), TYPE, "of dtype float32"),
    (scaled(MXFP8, lambda: f8(16, 2, dtype=E8)), VALUE, r"of shape \[16, 1\]"),
    (scaled(MXFP8, lambda: f32(16, 1)), TYPE, "8-bit"),
    (scaled(BLOCK_1D, lambda: f32(16, 2)), VALUE, r"of shape \[16, 1\]"),
    (scaled(out_dtype=E4M3), VALUE, "expected out_scale for 8-bit out, got none"),
    (plain(out_scale=lambda: f32(1)), VALUE, "expected no out_scale"),
    (plain(bias=lambda: f32(6).int(), fuse_bias=True), TYPE, "expected bias of"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ERRORS) + len(LAYER_ERRORS)))
def test_errors(number):
    function, kind, message = (ERRORS + LAYER_ERRORS)[number]
    with pytest.raises(kind, match=r"^gemm: .*" + message):
        function()


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_meta_checks_the_same(number):
    function, kind, message = ERRORS[number]
    with torch.device("meta"), pytest.raises(kind, match=r"^gemm: .*" + message):
        function()


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(to.InvalidTypeError, match="expected rhs on cpu as lhs, got it on meta"):
        raw(f32(4, 8), None, torch.ones(8, 6, device="meta"), None)
