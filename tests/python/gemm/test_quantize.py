"""Quantization, element by element against its definition in float64; special values; use as operators."""

import math

import pytest
import torch
from rank_values import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode
from torch_overlap.quantize import DelayedScaling, quantize

CURRENT, DELAYED = ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING
MXFP8, BLOCK_1D, BLOCK_2D = ScalingMode.MXFP8_1D_SCALING, ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING
ROW = ScalingMode.ROW_SCALING
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
MODES = [CURRENT, MXFP8, BLOCK_1D, BLOCK_2D, ROW]
# opcheck's remaining utility compares inputs before and after, which torch cannot do for 8-bit floats.
UTILITIES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def block_of(mode):
    """Returns the rows and columns that share a scale; None for all."""
    blocks = {MXFP8: (1, 32), BLOCK_1D: (1, 128), BLOCK_2D: (128, 128), ROW: (1, None)}
    return blocks.get(mode, (None, None))


def blocks_of(shape, mode):
    """Yields the scale's index and the slices of each block of a matrix."""
    height, width = (size or max(full, 1) for size, full in zip(block_of(mode), shape, strict=True))
    for i in range(math.ceil(shape[0] / height)):
        for j in range(math.ceil(shape[1] / width)):
            yield (i, j), (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))


def random_matrix(seed, rows, cols, dtype=torch.float32):
    """Returns magnitudes of many orders, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 8, (rows, 1), generator=generator) + torch.randint(
        -6, 6, (1, cols), generator=generator
    )
    values = torch.randn(rows, cols, generator=generator, dtype=torch.float64) * torch.exp2(exponents.double())
    return values.to(dtype)


def expected_scale_inv(amax, mode, dtype):
    """Returns the float64 scale_inv of a block whose largest magnitude is `amax` > 0."""
    largest = torch.finfo(dtype).max
    if mode is MXFP8:
        exponent = math.ceil(math.log2(amax / largest))  # the smallest power of two that does not saturate
        return 2.0 ** max(exponent, -127)
    return amax / largest


def check_matrix(x, data, scale_inv, mode, dtype, swizzled=False):
    """Checks every scale, and that every element is within half a step of the 8-bit type."""
    assert data.dtype is dtype
    assert data.is_contiguous()
    if swizzled:
        scale_inv = ops.unswizzle_scales(scale_inv, x.shape[0], x.shape[1] // 32)
    assert scale_inv.dtype is (E8M0 if mode is MXFP8 else torch.float32)
    for index, where in blocks_of(x.shape, mode):
        block = x[where].double()
        scale = float(scale_inv[index] if mode in (MXFP8, BLOCK_1D, BLOCK_2D, ROW) else scale_inv[0])
        amax = float(block.abs().max())
        assert scale == pytest.approx(expected_scale_inv(amax, mode, dtype), rel=1e-6), (index, amax)
        got = data[where].double()
        exact = block / scale
        mantissa = {E4M3: 3, E5M2: 2}[dtype]
        step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(torch.finfo(dtype).tiny))) - mantissa)
        wrong = (got - exact).abs() > step * 0.5001
        assert not wrong.any(), f"block {index}: {got[wrong]} for {exact[wrong]}"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scales_and_elements(mode, dtype, source, seed):
    x = random_matrix(seed, 160, 224, source)
    data, scale_inv, columns, column_scales = ops.quantize(x, mode, dtype, columnwise=True)
    check_matrix(x, data, scale_inv, mode, dtype)
    check_matrix(x.t(), columns, scale_inv if mode is CURRENT else column_scales, mode, dtype)
    assert (column_scales.numel() == 0) == (mode is CURRENT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (129, 160), (2, 5, 64), (2, 0, 32), (0, 32), (32, 0), (64,)])
def test_shapes(mode, shape, seed):
    x = random_matrix(seed, max(1, math.prod(shape)), 1).flatten()[: math.prod(shape)].view(shape)
    data, scale_inv, columns, column_scales = ops.quantize(x, mode)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    sizes = {
        CURRENT: (1,),
        MXFP8: (rows, cols // 32),
        BLOCK_1D: (rows, math.ceil(cols / 128)),
        BLOCK_2D: (math.ceil(rows / 128), math.ceil(cols / 128)),
        ROW: (rows, 1),
    }
    assert data.shape == x.shape
    assert scale_inv.shape == sizes[mode]
    assert columns.shape == column_scales.shape == (0,)
    if mode is BLOCK_1D and rows > 1 and cols > 0:
        assert scale_inv.stride() == (1, rows)
    if mode is BLOCK_2D and x.numel():
        assert scale_inv.stride(0) % 4 == 0
    if x.numel():
        check_matrix(x.view(rows, cols), data.view(rows, cols), scale_inv, mode, E4M3)
    assert ops.dequantize(data, scale_inv, mode).shape == x.shape


@pytest.mark.parametrize("mode", [CURRENT, BLOCK_1D, BLOCK_2D, ROW])
def test_sizes_that_are_no_multiple_of_a_block(mode, seed):
    x = random_matrix(seed, 131, 257)
    data, scale_inv, columns, column_scales = ops.quantize(x, mode, columnwise=True)
    check_matrix(x, data, scale_inv, mode, E4M3)
    check_matrix(x.t(), columns, scale_inv if mode is CURRENT else column_scales, mode, E4M3)


@pytest.mark.parametrize("mode", MODES)
def test_a_view_is_quantized_as_its_copy(mode, seed):
    x = random_matrix(seed, 256, 192)[::2, 32:160]
    for view in (x, x.t()):
        for got, want in zip(ops.quantize(view, mode), ops.quantize(view.contiguous(), mode), strict=True):
            assert_equal(got, want)


@pytest.mark.parametrize("mode", [CURRENT, BLOCK_1D, BLOCK_2D, ROW])
def test_scales_as_powers_of_two(mode, seed):
    x = random_matrix(seed, 160, 224)
    free = ops.quantize(x, mode)[1].double()
    data, scale_inv, *_ = ops.quantize(x, mode, power_of_two=True)
    assert_equal(scale_inv.double(), torch.exp2(torch.ceil(torch.log2(free * (1 - 1e-6)))))
    assert data.float().abs().max() <= 448


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64])
def test_dequantize_is_the_product(mode, target, seed):
    x = random_matrix(seed, 130, 160)
    data, scale_inv, *_ = ops.quantize(x, mode)
    want = torch.empty(x.shape, dtype=torch.float64)
    for index, where in blocks_of(x.shape, mode):
        scale = scale_inv[0] if mode is CURRENT else scale_inv[index]
        want[where] = data[where].double() * float(scale)
    assert_equal(ops.dequantize(data, scale_inv, mode, target), want.float().to(target))


# --- special values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mode", MODES)
def test_zeros(mode, dtype):
    data, scale_inv, *_ = ops.quantize(torch.zeros(128, 128), mode, dtype)
    assert_equal(data.float(), torch.zeros(128, 128))
    assert torch.isfinite(scale_inv.float()).all()
    if mode is not MXFP8:
        assert (scale_inv == 1).all()
    assert_equal(ops.dequantize(data, scale_inv, mode), torch.zeros(128, 128))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mode", [CURRENT, BLOCK_1D, BLOCK_2D, ROW])
def test_infinity_saturates_and_nan_stays(mode, dtype):
    x = torch.full((128, 128), 0.5)
    x[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    data, scale_inv, *_ = ops.quantize(x, mode, dtype)
    largest = torch.finfo(dtype).max
    assert scale_inv.flatten()[0] == 1
    assert data[0, :2].float().tolist() == [largest, -largest]
    assert math.isnan(data[0, 2].float())
    assert data[0, 3].float() == largest
    assert (data[0, 4:].float() == 0.5).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mxfp8_blocks_of_infinity_and_nan(dtype):
    x = torch.ones(3, 32)
    x[0, 3] = math.nan
    x[1, 4] = -math.inf
    data, scale_inv, *_ = ops.quantize(x, MXFP8, dtype)
    back = ops.dequantize(data, scale_inv, MXFP8)
    assert torch.isnan(scale_inv.float()).flatten().tolist() == [True, False, False]
    assert torch.isnan(back[0]).all()
    assert back[1, 4] == -math.inf
    assert torch.isfinite(back[1, 5:]).all()
    assert_equal(back[2], x[2])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_power_of_two_as_the_largest_of_an_mxfp8_block(dtype):
    """Limits of the exponent: subnormal amax, the byte 0, amax just above and at the largest value of the type."""
    largest = torch.finfo(dtype).max
    tops = torch.cat([torch.exp2(torch.arange(-149.0, 128.0)), torch.exp2(torch.arange(-130.0, 110.0)) * largest])
    tops = torch.cat([tops, torch.nextafter(tops, torch.tensor(math.inf))])
    tops = tops[torch.isfinite(tops)]
    x = tops[:, None] * torch.linspace(-1, 1, 32)
    x[:, 0] = tops
    data, scale_inv, *_ = ops.quantize(x, MXFP8, dtype)
    bytes_ = scale_inv.view(torch.uint8).flatten().int()
    exponent = torch.tensor([max(math.ceil(math.log2(top) - math.log2(largest) - 1e-9), -127) for top in tops.tolist()])
    exact = torch.tensor(
        [top / 2.0**e > largest for top, e in zip(tops.double().tolist(), exponent.tolist(), strict=True)]
    )
    assert_equal(bytes_, (exponent + exact.int() + 127).int())
    assert data.float().abs().max() <= largest


def test_the_smallest_and_the_largest_of_float32(seed):
    for top in (1e-45, 1e-38, 3e38):
        x = torch.full((1, 128), top)
        for mode in MODES:
            data, scale_inv, *_ = ops.quantize(x, mode)
            assert torch.isfinite(data.float()).all()
            assert torch.isfinite(scale_inv.float()).all()
            if top > 1e-44:
                torch.testing.assert_close(ops.dequantize(data, scale_inv, mode), x, rtol=0.07, atol=0)


# --- delayed scaling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("amax_compute", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_delayed_scaling_over_steps(amax_compute, margin, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scaling = DelayedScaling(3, dtype, margin=margin, amax_compute=amax_compute)
    largest = torch.finfo(dtype).max
    scale, amaxes = 1.0, []
    for step in range(8):
        x = torch.randn(17, 32, generator=generator) * 4.0 ** (step % 3)
        y = scaling.quantize(x, columnwise=True)
        assert float(y.scale_inv) == pytest.approx(1 / scale, rel=1e-6)
        want = (x * scaling.scale).clamp(-largest, largest).to(dtype)
        assert_equal(y.data, want)
        assert_equal(y.columnwise_data, want.t().contiguous())
        scaling.quantize(x / 2)  # a smaller amax of the same step has no effect
        scaling.update()
        amaxes.append(float(x.abs().max()))
        recent = amaxes[-1] if amax_compute == "most_recent" else max(amaxes[-3:])
        scale = largest / recent / 2.0**margin
        assert float(scaling.scale) == pytest.approx(scale, rel=1e-6), step
        assert scaling.amax_history[0] == 0


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_unusable_amax_keeps_the_scale(amax):
    history, scale = torch.tensor([amax, 0.0]), torch.tensor([3.0])
    ops.update_scale_(history, scale)
    assert scale == 3
    assert history[0] == 0


def test_scales_of_several_tensors_at_once():
    history, scale = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([1.0, 5.0])
    ops.update_scale_(history, scale)
    assert_equal(scale, torch.tensor([224.0, 5.0]))
    assert_equal(history, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


def test_the_ring_forgets_after_its_length():
    history, scale = torch.tensor([7.0, 0.0, 0.0]), torch.ones(1)
    seen = []
    for _ in range(4):
        ops.update_scale_(history, scale)
        seen.append(float(scale))
        history[0] = 1.0
    assert seen == [64.0, 64.0, 64.0, 448.0]


# --- swizzled scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 13), (256, 8), (0, 4), (5, 0)])
def test_every_swizzled_position(rows, blocks, seed):
    scales = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    swizzled = ops.swizzle_scales(scales)
    height, width = -(-rows // 128) * 128, -(-blocks // 4) * 4
    assert swizzled.shape == (height, width)
    flat, want = swizzled.flatten(), torch.zeros(height * width, dtype=torch.uint8)
    for i in range(rows):
        for j in range(blocks):
            tile = (i // 128) * (width // 4) + j // 4
            want[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4] = scales[i, j]
    assert_equal(flat, want)
    assert_equal(ops.unswizzle_scales(swizzled, rows, blocks), scales)
    assert_equal(ops.swizzle_scales(scales.view(E8M0)).view(torch.uint8), swizzled)


def test_128_rows_stay_together(seed):
    x = random_matrix(seed, 384, 160)
    whole = ops.quantize(x, MXFP8, swizzled=True)[1]
    part = ops.quantize(x[128:256], MXFP8, swizzled=True)[1]
    assert_equal(whole[128:256].view(torch.uint8), part.view(torch.uint8))


def test_quantize_swizzles_as_swizzle_scales(seed):
    x = random_matrix(seed, 160, 96)
    plain = ops.quantize(x, MXFP8, columnwise=True)
    swizzled = ops.quantize(x, MXFP8, columnwise=True, swizzled=True)
    for i in (1, 3):
        assert_equal(swizzled[i].view(torch.uint8), ops.swizzle_scales(plain[i]).view(torch.uint8))
    back = ops.dequantize(swizzled[0], swizzled[1], MXFP8, swizzled=True)
    assert_equal(back, ops.dequantize(plain[0], plain[1], MXFP8))


# --- as values, as operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_quantized_values(mode, seed):
    x = random_matrix(seed, 64, 96, torch.bfloat16).requires_grad_()
    q = quantize(x, mode, columnwise=True)
    t = q.transposed()
    assert_equal(t.dequantize(), ops.dequantize(q.columnwise_data, q.columnwise_scale_inv, mode))
    assert_equal(t.transposed().data, q.data)
    assert_equal(q.dequantize(torch.bfloat16), ops.dequantize(q.data, q.scale_inv, mode, torch.bfloat16))
    with pytest.raises(ValueError, match="columnwise=True"):
        quantize(x, mode).transposed()


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode, seed):
    x = random_matrix(seed, 160, 96)
    raw = torch.ops.torch_overlap
    swizzled = mode is MXFP8
    torch.library.opcheck(raw.quantize.default, (x, int(mode)), {"columnwise": True, "swizzled": swizzled})
    torch.library.opcheck(raw.quantize.default, (x, int(mode), E5M2))
    data, scale_inv, *_ = ops.quantize(x, mode, swizzled=swizzled)
    torch.library.opcheck(
        raw.dequantize.default, (data, scale_inv, int(mode), torch.bfloat16, swizzled), test_utils=UTILITIES
    )


def test_opcheck_of_the_others(seed):
    x = random_matrix(seed, 40, 96)
    raw = torch.ops.torch_overlap
    torch.library.opcheck(raw.quantize_delayed.default, (x, torch.full((1,), 3.0), E5M2, True))
    torch.library.opcheck(raw.quantize_delayed.default, (x, torch.full((1,), 3.0)))
    torch.library.opcheck(raw.update_scale_.default, (torch.rand(4), torch.rand(1), E4M3, 1, "most_recent"))
    scales = ops.quantize(x, MXFP8)[1]
    torch.library.opcheck(raw.swizzle_scales.default, (scales,), test_utils=UTILITIES)
    torch.library.opcheck(raw.swizzle_scales.default, (scales.view(torch.uint8),))
    swizzled = ops.swizzle_scales(scales)
    torch.library.opcheck(raw.unswizzle_scales.default, (swizzled, *scales.shape), test_utils=UTILITIES)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled(backend, seed):
    def step(x, history, scale):
        results = [ops.quantize(x, mode, columnwise=True, swizzled=mode is MXFP8) for mode in MODES]
        y = quantize(x, MXFP8).dequantize()
        *delayed, amax = ops.quantize_delayed(x, scale)
        history[:1].copy_(amax)
        ops.update_scale_(history, scale)
        return results, y, delayed[1], scale * 1

    x = random_matrix(seed, 160, 96)
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in (160, 64):
        states = [(torch.zeros(2), torch.ones(1)) for _ in range(2)]
        want, got = step(x[:rows], *states[0]), compiled(x[:rows], *states[1])
        for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
            assert_equal(a, b)
        for a, b in zip(*states, strict=True):
            assert_equal(a, b)


def test_meta_and_fake_shapes():
    for make in (lambda: torch.device("meta"), FakeTensorMode):
        with make():
            x = torch.empty(3, 160, 96, dtype=torch.bfloat16)
            data, scale_inv, columns, column_scales = ops.quantize(x, MXFP8, columnwise=True, swizzled=True)
            assert data.shape == x.shape
            assert scale_inv.shape == (512, 4)
            assert columns.shape == (96, 480)
            assert column_scales.shape == (128, 16)
            assert ops.dequantize(data, scale_inv, MXFP8, swizzled=True).dtype is torch.float32


def test_no_gradient_is_an_error_not_a_zero(seed):
    x = random_matrix(seed, 32, 32).requires_grad_()
    data, scale_inv, *_ = ops.quantize(x)
    y = ops.dequantize(data, scale_inv)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


# --- errors ------------------------------------------------------------------------------------------------


def x32(rows=32, cols=32, dtype=torch.float32):
    return torch.ones(rows, cols, dtype=dtype)


def scales(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


VALUE, TYPE = to.InvalidValueError, to.InvalidTypeError
ERRORS = [
    (lambda: ops.quantize(torch.ones(())), VALUE, r"^quantize: expected x of one or more dimensions"),
    (lambda: ops.quantize(x32(dtype=torch.int32)), TYPE, r"^quantize: expected x of dtype float32.*got torch.int32"),
    (lambda: ops.quantize(x32(dtype=E4M3)), TYPE, r"^quantize: expected x of dtype float32"),
    (lambda: ops.quantize(x32(), CURRENT, torch.bfloat16), TYPE, r"^quantize: expected the 8-bit dtype"),
    (lambda: ops.quantize(x32(), 0), VALUE, r"^quantize: expected a scaling_mode of 8-bit values"),
    (lambda: ops.quantize(x32(), 7), VALUE, r"^quantize: expected a scaling mode, got 7"),
    (lambda: ops.quantize(x32(), CURRENT, swizzled=True), VALUE, r"^quantize: expected swizzled scales for MXFP8"),
    (lambda: ops.quantize(x32(cols=33), MXFP8), VALUE, r"multiple of 32 elements for MXFP8_1D_SCALING, got 33"),
    (lambda: ops.quantize(x32(rows=33), MXFP8, columnwise=True), VALUE, r"multiple of 32 elements.*got 33"),
    (lambda: ops.quantize_delayed(x32(), scales(2)), VALUE, r"^quantize_delayed: expected a scale of one element"),
    (lambda: ops.quantize_delayed(x32(), scales(1, dtype=torch.float16)), TYPE, r"expected scale of dtype float32"),
    (lambda: ops.dequantize(x32(), scales(1)), TYPE, r"^dequantize: expected the 8-bit dtype"),
    (lambda: ops.dequantize(x32(dtype=E4M3), scales(1), 0), VALUE, r"^dequantize: expected a scaling_mode of 8-bit"),
    (lambda: ops.dequantize(x32(dtype=E4M3), scales(2)), VALUE, r"^dequantize: expected scale_inv of shape \[1\]"),
    (
        lambda: ops.dequantize(x32(dtype=E4M3), scales(32, 2, dtype=E8M0), MXFP8),
        VALUE,
        r"expected scale_inv of shape \[32, 1\]",
    ),
    (
        lambda: ops.dequantize(x32(dtype=E4M3), scales(32, 1), MXFP8),
        TYPE,
        r"expected scale_inv of dtype torch.float8_e8m0fnu",
    ),
    (lambda: ops.dequantize(x32(dtype=E4M3), scales(1), CURRENT, torch.int32), TYPE, r"expected a result of dtype"),
    (lambda: ops.dequantize(x32(dtype=E4M3), scales(1), CURRENT, swizzled=True), VALUE, r"swizzled scales for MXFP8"),
    (lambda: ops.swizzle_scales(scales(4, 4)), TYPE, r"^swizzle_scales: expected scales of dtype float8_e8m0fnu"),
    (lambda: ops.swizzle_scales(scales(4, dtype=E8M0)), VALUE, r"^swizzle_scales: expected scales \[rows, blocks\]"),
    (
        lambda: ops.unswizzle_scales(scales(4, 4, dtype=E8M0), 4, 4),
        VALUE,
        r"^unswizzle_scales: expected swizzled scales \[128, 4\]",
    ),
    (lambda: ops.update_scale_(torch.zeros(3), scales(2)), VALUE, r"^update_scale_: expected amax_history \[length\]"),
    (lambda: ops.update_scale_(torch.zeros(3), scales(1, dtype=torch.float64)), TYPE, r"of dtype float32"),
    (lambda: ops.update_scale_(torch.zeros(3), scales(1), amax_compute="mean"), VALUE, r"got 'mean'"),
    (lambda: DelayedScaling(0), ValueError, r"one or more steps, got 0"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number):
    call, kind, message = ERRORS[number]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("number", [i for i, e in enumerate(ERRORS[:18]) if "amax" not in e[2]])
def test_meta_kernels_check_the_same(number):
    call, kind, message = ERRORS[number]
    with torch.device("meta"), pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("mode", MODES)
def test_strides_are_those_of_the_meta_kernels(mode):
    for shape, strided in ((s, t) for s in ((1, 32), (32, 1), (64, 96), (1, 1), (160, 128)) for t in (False, True)):
        if mode is MXFP8 and (shape[0] % 32 or shape[1] % 32):
            continue
        x = torch.randn(shape[::-1]).t() if strided else torch.randn(shape)
        for swizzled in (False, True) if mode is MXFP8 else (False,):
            got = ops.quantize(x, mode, columnwise=True, swizzled=swizzled)
            want = ops.quantize(x.to("meta"), mode, columnwise=True, swizzled=swizzled)
            assert [t.stride() for t in got] == [t.stride() for t in want], (shape, strided)
            back = ops.dequantize(*got[:2], mode, swizzled=swizzled)
            assert back.stride() == ops.dequantize(*want[:2], mode, swizzled=swizzled).stride()
        if mode is CURRENT:
            scale = torch.ones(1)
            got = ops.quantize_delayed(x, scale, columnwise=True)
            want = ops.quantize_delayed(x.to("meta"), scale.to("meta"), columnwise=True)
            assert [t.stride() for t in got] == [t.stride() for t in want], (shape, strided)
