"""The operators gemm, grouped_gemm and quantize on one GPU: compared with their values on the CPU, and captured in a
graph."""

import pytest
import torch

from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode

pytestmark = pytest.mark.gpu(1)

MXFP8, BLOCK_1D, BLOCK_2D = ScalingMode.MXFP8_1D_SCALING, ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING
CURRENT = ScalingMode.CURRENT_TENSOR_SCALING
MODES = [CURRENT, MXFP8, BLOCK_1D, BLOCK_2D]


@pytest.fixture
def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got, want, what=""):
    """Compares within the rounding of the result's dtype and of sums in another order."""
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
    got, want = got.cpu().double(), want.double()
    scale = float(want.abs().max()) if want.numel() else 1.0
    error = (got - want).abs()
    assert got.shape == want.shape, what
    if error.numel():
        worst = int(error.flatten().argmax())
        assert bool((error <= tolerance * (want.abs() + scale)).all()), (
            f"{what}: {error.flatten()[worst]} at {worst}, expected {want.flatten()[worst]}"
        )


def needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores of 8-bit floats")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mode", MODES)
def test_quantization_is_that_of_the_cpu(mode, dtype, data):
    x = data(160, 224)
    x[3, 5] = 0
    for source in (x, x.bfloat16()):
        want = ops.quantize(source, mode, dtype, columnwise=True, swizzled=mode is MXFP8)
        got = ops.quantize(source.cuda(), mode, dtype, columnwise=True, swizzled=mode is MXFP8)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.stride() == b.stride()
            if mode is MXFP8:  # powers of two: nothing rounds
                assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)), f"result {i}"
            elif b.dtype is torch.float32:
                torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=0)
        if mode is not MXFP8:  # a reciprocal may differ in its last bit
            torch.testing.assert_close(ops.dequantize(got[0], got[1], mode).cpu(),
                                       ops.dequantize(want[0], want[1], mode), rtol=0.26, atol=3e-5)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_epilogues(dtype, data):
    x, w, b, h = (
        data(3, 16, 64, dtype=dtype),
        data(32, 64, dtype=dtype),
        data(32, dtype=dtype),
        data(3, 16, 32, dtype=dtype),
    )
    forward = {"rhs_transposed": True, "fuse_bias": True, "fuse_gelu": True}
    backward = {"rhs_transposed": True, "fuse_bias": True, "fuse_gelu": True, "grad": True}
    weight = {"lhs_transposed": True, "lhs_axis_boundary": 2, "rhs_axis_boundary": 2, "fuse_bias": True, "grad": True}
    for arguments, options in (((x, w, b), forward), ((x, w, None, h), backward), ((h, x), weight)):
        lhs, rhs, *rest = arguments
        want = ops.gemm(lhs, None, rhs, None, *rest, **options)
        got = ops.gemm(lhs.cuda(), None, rhs.cuda(), None, *(t if t is None else t.cuda() for t in rest), **options)
        for i, (a, e) in enumerate(zip(got, want, strict=True)):
            close(a, e, f"result {i} of {options}")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", [CURRENT, MXFP8, BLOCK_1D])
def test_8_bit_operands(mode, split, data):
    needs_fp8()
    if mode is BLOCK_1D and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("block scaling runs on sm_90")
    x8, xs = ops.quantize(data(128, 256), mode)[:2]
    w8, ws = ops.quantize(data(256, 256), mode)[:2]
    bias = data(256, dtype=torch.bfloat16)
    options = {"scaling_mode": mode, "rhs_transposed": True, "fuse_bias": True, "use_split_accumulator": split}
    want = ops.gemm(x8, xs, w8, ws, bias, **options)[0]
    close(ops.gemm(x8.cuda(), xs.cuda(), w8.cuda(), ws.cuda(), bias.cuda(), **options)[0], want)
    group = [[t.cuda()] for t in (x8, w8, bias, xs, ws)]
    (grouped,) = ops.grouped_gemm(*group, scaling_mode=mode, rhs_transposed=True, use_split_accumulator=split)
    close(grouped, want, "grouped")


def test_128_x_128_blocks_of_weights(data):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("block scaling runs on sm_90")
    x, w = data(128, 256), data(256, 256)
    w8, ws = ops.quantize(w, BLOCK_2D)[:2]
    x8, xs = ops.quantize(x, BLOCK_1D)[:2]
    options = {"scaling_mode": BLOCK_2D, "rhs_transposed": True}
    want = ops.gemm(x8, xs, w8, ws, **options)[0]
    close(ops.gemm(x8.cuda(), xs.cuda(), w8.cuda(), ws.cuda(), **options)[0], want, "moved")
    on_gpu = ops.quantize(x.cuda(), BLOCK_1D)[:2], ops.quantize(w.cuda(), BLOCK_2D)[:2]
    close(ops.gemm(*on_gpu[0], *on_gpu[1], **options)[0], want, "quantized there")


def test_gradients_and_groups(data):
    sizes = [(16, 24, 32), (0, 8, 32), (40, 24, 32)]
    lhs, rhs = [data(m, k) for m, _, k in sizes], [data(n, k) for _, n, k in sizes]
    biases = [data(n) for _, n, _ in sizes]
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).detach().requires_grad_() for t in (*lhs, *rhs, *biases)]
        outputs = ops.grouped_gemm(leaves[:3], leaves[3:6], leaves[6:], rhs_transposed=True)
        single = ops.gemm(leaves[0], None, leaves[3], None, leaves[6], rhs_transposed=True, fuse_bias=True,
                          fuse_gelu=True)[0]  # fmt: skip
        loss = sum(out.square().sum() for out in outputs) + single.square().sum()
        results.append([*(out.detach() for out in outputs), *torch.autograd.grad(loss, leaves)])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        close(got, want, f"result {i}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, data):
    x, w = data(16, 32).cuda(), data(24, 32).cuda()
    with torch.autocast("cuda", dtype):
        out = ops.gemm(x, None, w, None, rhs_transposed=True)[0]
        (grouped,) = ops.grouped_gemm([x], [w], rhs_transposed=True)
    assert out.dtype is grouped.dtype is dtype
    close(out, x.cpu().to(dtype).double() @ w.cpu().to(dtype).double().t())
    close(grouped, out.cpu())


def test_a_training_step_in_a_graph(data):
    """Quantizes, multiplies and updates the scale; inputs change between replays."""
    needs_fp8()
    x, w = torch.zeros(64, 128, device="cuda"), data(48, 128).cuda()
    history, scale = torch.zeros(4, device="cuda"), torch.ones(1, device="cuda")

    def step():
        x8, xs, _, amax = ops.quantize_delayed(x, scale)
        w8, ws = ops.quantize(w)[:2]
        y = ops.gemm(x8, xs, w8, ws, scaling_mode=CURRENT, rhs_transposed=True)[0]
        z = ops.grouped_gemm([x, x[:16]], [w, w], rhs_transposed=True)
        history[:1].copy_(amax)
        ops.update_scale_(history, scale)
        return y, *z

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for magnitude in (1.0, 7.0, 0.25):
        x.copy_(data(64, 128) * magnitude)
        state = history.clone(), scale.clone()
        graph.replay()
        replayed = [t.clone() for t in (*results, history, scale)]
        history.copy_(state[0])
        scale.copy_(state[1])
        for i, (got, want) in enumerate(zip(replayed, (*step(), history, scale), strict=True)):
            close(got, want.cpu(), f"result {i} at {magnitude}")
