"""The kernels that quantize and dequantize: every element and scale equals that of the CPU, to the bit."""

import itertools

import pytest
import torch

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode

pytestmark = pytest.mark.gpu(1)

CURRENT, MXFP8, ROW = (
    ScalingMode.CURRENT_TENSOR_SCALING,
    ScalingMode.MXFP8_1D_SCALING,
    ScalingMode.ROW_SCALING,
)
BLOCK_1D, BLOCK_2D = ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING
MODES = [CURRENT, MXFP8, BLOCK_1D, BLOCK_2D, ROW]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
# Parts of a tile, whole tiles, rows that no vector divides, rows longer than a block keeps.
SHAPES = [(1, 32), (160, 224), (3, 5, 96), (32, 8), (129, 257), (7, 1), (256, 384), (64, 9000), (1057, 1312)]
SHAPES += [(64, 100), (64, 97), (100, 64), (257,)]


@pytest.fixture
def data(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=torch.float32):
        """Returns magnitudes of many orders, so that blocks differ, and rows of zeros."""
        x = torch.randn(shape, generator=generator)
        x *= torch.exp2(torch.randint(-12, 8, (*shape[:-1], 1), generator=generator).float())
        x *= torch.exp2(torch.randint(-6, 6, (shape[-1],), generator=generator).float())
        x *= torch.rand((*shape[:-1], 1), generator=generator) > 0.05
        return x.to(dtype)

    return draw


def is_possible(shape, mode, columnwise):
    rows = torch.Size(shape[:-1]).numel()
    return mode is not MXFP8 or (shape[-1] % 32 == 0 and (not columnwise or rows % 32 == 0))


def assert_same(got, want):
    """Compares shape, strides and bits; any NaN equals any other."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    got = got.cpu()
    if want.dtype.itemsize == 1:
        numbers = ~(want.float().isnan() & got.float().isnan())
        got, want = (t.contiguous().view(torch.uint8) for t in (got, want))
        wrong = (got != want) & numbers
    else:
        wrong = (got != want) & ~(got.isnan() & want.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


def check(x, mode, dtype, on_gpu=None, **options):
    want = ops.quantize(x, mode, dtype, **options)
    got = ops.quantize(x.cuda() if on_gpu is None else on_gpu, mode, dtype, **options)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    return got, want


@pytest.mark.parametrize("source", WIDE, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_shape(mode, dtype, source, data):
    for shape, columnwise, power_of_two in itertools.product(SHAPES, (False, True), (False, True)):
        if is_possible(shape, mode, columnwise):
            check(data(*shape, dtype=source), mode, dtype, columnwise=columnwise, power_of_two=power_of_two)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("shape", [(32, 32), (160, 416), (288, 128), (1056, 1312)])
def test_swizzled_scales_are_padded_with_zeros(shape, columnwise, data):
    for source in WIDE:
        torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda")  # elements that are not written are detected
        check(data(*shape, dtype=source), MXFP8, FORMATS[0], columnwise=columnwise, swizzled=True)


@pytest.mark.parametrize("mode", MODES)
def test_any_place_and_any_strides(mode, data):
    for source, columnwise in itertools.product(WIDE, (False, True)):
        whole = data(65 * 96 + 7, dtype=source)
        for begin in (1, 3, 4, 7):
            x = whole[begin : begin + 64 * 96].view(64, 96)
            check(x, mode, FORMATS[0], whole.cuda()[begin : begin + 64 * 96].view(64, 96), columnwise=columnwise)
        square = data(96, 160, dtype=source)
        check(square.t(), mode, FORMATS[0], square.cuda().t(), columnwise=columnwise)
        check(square[:, 32:64], mode, FORMATS[0], square.cuda()[:, 32:64], columnwise=columnwise)


@pytest.mark.parametrize("source", WIDE, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_special_values(mode, dtype, source, data):
    tiny, most = torch.finfo(source).smallest_normal, torch.finfo(source).max
    values = [float("nan"), float("inf"), -float("inf"), most, -most, tiny, tiny / 4, 0.0, -0.0, 448.0, 57344.0, 1e-30]
    for value, columnwise in itertools.product(values, (False, True)):
        x = data(128, 128, dtype=source)
        x[::37, ::29] = value
        check(x, mode, dtype, columnwise=columnwise)
        check(torch.full((32, 64), value, dtype=source), mode, dtype, columnwise=columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("source", WIDE, ids=str)
def test_delayed_scales(source, columnwise, data):
    for shape, dtype in itertools.product(SHAPES, FORMATS):
        x, scale = data(*shape, dtype=source), data(1).abs() + 0.01
        for scaled in (x, x * float("nan"), x.clone().fill_(float("inf"))):
            want = ops.quantize_delayed(scaled, scale, dtype, columnwise=columnwise)
            got = ops.quantize_delayed(scaled.cuda(), scale.cuda(), dtype, columnwise=columnwise)
            for a, b in zip(got, want, strict=True):
                assert_same(a, b)


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_dequantize(mode, dtype, wide, data):
    for shape in SHAPES:
        for swizzled in (False, True) if mode is MXFP8 else (False,):
            if not is_possible(shape, mode, False):
                continue
            values, scales, *_ = ops.quantize(data(*shape), mode, dtype, swizzled=swizzled)
            values = values.view(torch.uint8).random_().view(dtype)  # all values
            if mode is MXFP8:
                scales.view(torch.uint8).random_()
            want = ops.dequantize(values, scales, mode, wide, swizzled=swizzled)
            assert_same(ops.dequantize(values.cuda(), scales.cuda(), mode, wide, swizzled=swizzled), want)
    values, scales, *_ = ops.quantize(data(64, 96 + 32), mode, dtype)
    apart = torch.empty(64 * 128 + 3, dtype=torch.uint8, device="cuda")[3:].view(dtype).view(64, 128)
    apart.copy_(values.cuda())
    assert_same(ops.dequantize(apart, scales.cuda(), mode, wide), ops.dequantize(values, scales, mode, wide))


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_with_changing_inputs(mode, data):
    x = torch.empty(160, 288, dtype=torch.bfloat16, device="cuda")
    scale = torch.ones(1, device="cuda")

    def all_of_it():
        made = ops.quantize(x, mode, columnwise=True)
        return [*made, ops.dequantize(made[0], made[1], mode), *ops.quantize_delayed(x, scale, columnwise=True)]

    all_of_it()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = all_of_it()
    for _ in range(20):
        fresh = data(160, 288, dtype=torch.bfloat16)
        x.copy_(fresh)
        for result in results:
            result.view(torch.uint8).fill_(0xFF) if result.is_contiguous() else result.fill_(float("nan"))
        graph.replay()
        made = ops.quantize(fresh, mode, columnwise=True)
        delayed = ops.quantize_delayed(fresh, torch.ones(1), columnwise=True)
        for got, want in zip(results, [*made, ops.dequantize(made[0], made[1], mode), *delayed], strict=True):
            assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_more_elements_than_an_int_counts(mode):
    """The last rows are the same as without the others; the largest of all values is among the others."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free memory")
    rows, columns = (1 << 16) + 128, 1 << 15
    x = torch.randn(columns, device="cuda").bfloat16().repeat(rows, 1)
    x[-128:] = torch.randn(128, columns, device="cuda")
    x[:, 0] = 100
    whole = ops.quantize(x, mode, columnwise=True)
    last = ops.quantize(x[-128:], mode, columnwise=True)
    assert torch.equal(whole[0][-128:].view(torch.uint8), last[0].view(torch.uint8))
    if mode is not ROW:  # its columns have scales of their own
        assert torch.equal(whole[2][:, -128:].view(torch.uint8), last[2].view(torch.uint8))
    del last
    values = ops.dequantize(whole[0], whole[1], mode, torch.bfloat16)
    assert ((values[-128:].float() - x[-128:].float()).abs() <= 0.07 * x[-128:].float().abs() + 0.3).all()
    flat = ops.quantize(x, mode)
    assert torch.equal(flat[0].view(torch.uint8), whole[0].view(torch.uint8))


def test_the_largest_of_all_is_the_last(data):
    for source in WIDE:
        x = data(20_000_003, dtype=source).clamp(-50, 50)
        x[-1] = 3000
        (got, *_), _ = check(x, CURRENT, FORMATS[0])
        assert got[-1].float() == 448


def test_delayed_scales_of_any_shape(data):
    x = data(64, 96)
    for scale in (torch.tensor(3.0), torch.full((1, 1), 0.0), torch.tensor([float("nan")]), torch.tensor([1e-42])):
        want = ops.quantize_delayed(x, scale, columnwise=True)
        for a, b in zip(ops.quantize_delayed(x.cuda(), scale.cuda(), columnwise=True), want, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("swizzled", [False, True])
def test_dequantize_scales_that_do_not_lie_side_by_side(swizzled, data):
    values, scales, *_ = ops.quantize(data(256, 384), MXFP8, swizzled=swizzled)
    apart = torch.empty(*scales.shape, 2, dtype=torch.uint8, device="cuda")[..., 0]
    apart.copy_(scales.view(torch.uint8))
    assert_same(
        ops.dequantize(values.cuda(), apart.view(scales.dtype), MXFP8, torch.float32, swizzled=swizzled),
        ops.dequantize(values, scales, MXFP8, torch.float32, swizzled=swizzled),
    )
    values, scales, *_ = ops.quantize(data(300, 700), BLOCK_2D)
    wide = torch.full((3, 11), float("nan"), device="cuda")[:, :6].copy_(scales)
    want = ops.dequantize(values, scales, BLOCK_2D, torch.float32)
    assert_same(ops.dequantize(values.cuda(), wide, BLOCK_2D, torch.float32), want)


@pytest.mark.parametrize("amax_compute", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_update_scale(length, amax_compute, data):
    for shape in ((length,), (length, 1), (length, 5), (length, 300)):
        history, scale = data(*shape).abs(), data(shape[1] if len(shape) > 1 else 1).abs()
        for value in (float("nan"), float("inf"), 0.0, 1e-42):
            history.view(-1)[:: length + 3] = value
            for margin in (0, 2):
                on_gpu = history.cuda(), scale.cuda()
                for tensors in ((history, scale), on_gpu):
                    ops.update_scale_(*tensors, torch.float8_e5m2, margin=margin, amax_compute=amax_compute)
                for got, want in zip(on_gpu, (history, scale), strict=True):
                    assert_same(got, want)
        apart = torch.zeros(*shape, 2, device="cuda")[..., 0].copy_(history)  # rows that are not contiguous
        ops.update_scale_(apart, on_gpu[1], amax_compute=amax_compute)
        ops.update_scale_(history, scale, amax_compute=amax_compute)
        assert_same(apart.clone(memory_format=torch.contiguous_format), history)
        assert_same(on_gpu[1], scale)


def test_history_and_scale_lie_on_one_device():
    with pytest.raises(to.InvalidTypeError, match=r"on one device, got cpu and cuda:\d"):
        ops.update_scale_(torch.zeros(4), torch.ones(1, device="cuda"))
