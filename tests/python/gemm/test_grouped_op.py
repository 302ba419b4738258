"""The operator grouped_gemm: values against float64, gradients, autocast, compilation, errors."""

import itertools

import pytest
import torch
from rank_values import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode

E4M3 = torch.float8_e4m3fn
MXFP8, BLOCK_1D = ScalingMode.MXFP8_1D_SCALING, ScalingMode.BLOCK_1D_SCALING
CURRENT = ScalingMode.CURRENT_TENSOR_SCALING
LAYOUTS = list(itertools.product([False, True], repeat=2))
raw = torch.ops.torch_overlap.grouped_gemm
SIZES = [(16, 24, 32), (0, 8, 32), (40, 24, 32), (8, 16, 0), (1, 5, 3)]  # m, n, k


def check(got, want, what=""):
    rtol = torch.finfo(got.dtype).eps
    atol = 1e-12 if got.dtype is torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def operands(data, sizes, dtype, lhs_t, rhs_t):
    lhs = [data(*((k, m) if lhs_t else (m, k)), dtype=dtype) for m, _, k in sizes]
    rhs = [data(*((n, k) if rhs_t else (k, n)), dtype=dtype) for _, n, k in sizes]
    return lhs, rhs


def turned(matrix, transposed):
    return matrix.double().t() if transposed else matrix.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("lhs_t", "rhs_t"), LAYOUTS)
@pytest.mark.parametrize("biased", [False, True])
def test_values(dtype, lhs_t, rhs_t, biased, data):
    lhs, rhs = operands(data, SIZES, dtype, lhs_t, rhs_t)
    biases = [data(n, dtype=dtype) if i % 2 == 0 else None for i, (_, n, _) in enumerate(SIZES)] if biased else []
    outputs = ops.grouped_gemm(lhs, rhs, biases, lhs_transposed=lhs_t, rhs_transposed=rhs_t)
    assert len(outputs) == len(SIZES)
    for i, out in enumerate(outputs):
        want = turned(lhs[i], lhs_t) @ turned(rhs[i], rhs_t)
        if biased and biases[i] is not None:
            want = want + biases[i].double()
        assert out.dtype is dtype
        check(out, want, f"problem {i}")


def test_a_wider_output(data):
    lhs, rhs = operands(data, SIZES, torch.bfloat16, False, True)
    for out, x, w in zip(
        ops.grouped_gemm(lhs, rhs, rhs_transposed=True, out_dtype=torch.float32), lhs, rhs, strict=True
    ):
        assert out.dtype is torch.float32
        check(out, x.double() @ w.double().t())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in ScalingMode if mode != ScalingMode.NO_SCALING])
def test_scaled_groups(mode, split, data):
    sizes = [(16, 24, 32), (0, 16, 64), (64, 8, 96)]
    lhs, rhs = operands(data, sizes, torch.float32, False, True)
    biases = [data(n, dtype=torch.bfloat16) for _, n, _ in sizes]
    of_weights, of_rows = mode, mode
    if mode == ScalingMode.DELAYED_TENSOR_SCALING:
        of_weights = of_rows = CURRENT  # factors are computed from the tensor itself
    elif mode == ScalingMode.BLOCK_2D_SCALING:
        of_rows = BLOCK_1D
    lhs8, lhs_scales = zip(*(ops.quantize(x, of_rows)[:2] for x in lhs), strict=True)
    rhs8, rhs_scales = zip(*(ops.quantize(x, of_weights)[:2] for x in rhs), strict=True)
    outputs = ops.grouped_gemm(
        lhs8, rhs8, biases, lhs_scales, rhs_scales, scaling_mode=mode, rhs_transposed=True, use_split_accumulator=split
    )
    for i, out in enumerate(outputs):
        left = ops.dequantize(lhs8[i], lhs_scales[i], of_rows, torch.float64)
        right = ops.dequantize(rhs8[i], rhs_scales[i], of_weights, torch.float64)
        assert out.dtype is torch.bfloat16
        check(out, left @ right.t() + biases[i].double(), f"problem {i}")


def test_swizzled_scales_give_the_same(data):
    lhs, rhs = operands(data, [(160, 48, 192), (16, 8, 32)], torch.float32, False, True)
    plain, swizzled = ([ops.quantize(x, MXFP8, swizzled=s)[:2] for x in lhs + rhs] for s in (False, True))

    def run(parts, scales_swizzled):
        values, scales = zip(*parts, strict=True)
        return ops.grouped_gemm(
            values[:2], values[2:], (), scales[:2], scales[2:],
            scaling_mode=MXFP8, rhs_transposed=True, scales_swizzled=scales_swizzled,
        )  # fmt: skip

    for got, want in zip(run(swizzled, True), run(plain, False), strict=True):
        assert_equal(got, want)


def test_a_group_of_nothing():
    assert ops.grouped_gemm([], []) == []


@pytest.mark.parametrize(("lhs_t", "rhs_t"), LAYOUTS)
def test_gradients_of_any_order(lhs_t, rhs_t, data):
    sizes = [(3, 4, 2), (1, 2, 5)]
    lhs, rhs = operands(data, sizes, torch.float64, lhs_t, rhs_t)
    bias = data(2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (*lhs, *rhs, bias)]

    def function(*tensors):
        options = {"lhs_transposed": lhs_t, "rhs_transposed": rhs_t}
        return tuple(ops.grouped_gemm(tensors[:2], tensors[2:4], [None, tensors[4]], **options))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_gradients_of_what_was_used_only(data):
    lhs, rhs = operands(data, [(3, 4, 2)] * 3, torch.float32, False, False)
    for tensor in (*lhs[:2], *rhs):
        tensor.requires_grad_()
    outputs = ops.grouped_gemm(lhs, rhs)
    (outputs[0].sum() + outputs[2].square().sum()).backward()
    assert lhs[1].grad is None
    assert lhs[2].grad is None
    assert rhs[1].grad is None
    check(lhs[0].grad, torch.ones(3, 4, dtype=torch.float64) @ rhs[0].double().t())
    check(rhs[2].grad, lhs[2].double().t() @ (2 * lhs[2].double() @ rhs[2].double()))


def test_no_gradient_of_8_bit_operands(data):
    x8, xs = ops.quantize(data(16, 32))[:2]
    bias = data(16, dtype=torch.bfloat16).requires_grad_()
    (out,) = ops.grouped_gemm([x8], [x8], [bias], [xs], [xs], scaling_mode=CURRENT, rhs_transposed=True)
    with pytest.raises(RuntimeError, match=r"^grouped_gemm: expected operands of NO_SCALING where a gradient is asked"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, data):
    lhs, rhs = operands(data, SIZES, torch.float32, False, False)
    biases = [None, *(data(n) for _, n, _ in SIZES[1:])]
    x8, xs = ops.quantize(data(16, 32))[:2]
    with torch.autocast("cpu", dtype):
        outputs = ops.grouped_gemm(lhs, rhs, biases)
        (scaled,) = ops.grouped_gemm([x8], [x8], (), [xs], [xs], scaling_mode=CURRENT, rhs_transposed=True)
    assert scaled.dtype is dtype
    cast = [[t if t is None else t.to(dtype) for t in tensors] for tensors in (lhs, rhs, biases)]
    for got, want in zip(outputs, ops.grouped_gemm(*cast), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled(backend, data):
    def step(lhs, rhs, bias):
        return sum(out.square().sum() for out in ops.grouped_gemm(lhs, rhs, [bias, None], rhs_transposed=True))

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in (8, 24):
        lhs, rhs = operands(data, [(rows, 4, 16), (5, rows, 16)], torch.float32, False, True)
        leaves = [t.requires_grad_() for t in (*lhs, *rhs, data(4))]
        want, got = (torch.autograd.grad(f(lhs, rhs, leaves[4]), leaves) for f in (step, compiled))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_opcheck(data):
    lhs, rhs = operands(data, SIZES, torch.float32, False, False)
    torch.library.opcheck(raw.default, (lhs, rhs, [], [], []))
    torch.library.opcheck(raw.default, (lhs, rhs, [None, None, data(24), None, data(5)], [], []))
    leaves = [
        [t.requires_grad_() for t in tensors] for tensors in operands(data, SIZES[::2], torch.float32, True, True)
    ]
    options = {"lhs_transposed": True, "rhs_transposed": True}
    torch.library.opcheck(raw.default, (*leaves, [None, data(24).requires_grad_(), None], [], []), options)
    x8, xs = ops.quantize(data(16, 32), MXFP8)[:2]
    torch.library.opcheck(
        raw.default, ([x8], [x8], [], [xs], [xs]), {"scaling_mode": int(MXFP8), "rhs_transposed": True},
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["meta", "fake"])
def test_shapes_without_data(how):
    with FakeTensorMode() if how == "fake" else torch.device("meta"):
        outputs = ops.grouped_gemm([torch.empty(3, 4), torch.empty(0, 4)], [torch.empty(5, 4)] * 2, rhs_transposed=True)
        assert [tuple(out.shape) for out in outputs] == [(3, 5), (0, 5)]


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


GROUP = {"scaling_mode": CURRENT, "rhs_transposed": True}
VALUE, TYPE = to.InvalidValueError, to.InvalidTypeError
ERRORS = [
    (lambda: ops.grouped_gemm([ones(2, 3)], []), VALUE, "expected rhs, one for each of the 1 of lhs, got 0"),
    (
        lambda: ops.grouped_gemm([ones(2, 3)] * 2, [ones(3, 2)] * 2, [None]),
        VALUE,
        "expected no biases or one for each of the 2 of lhs, got 1",
    ),
    (
        lambda: ops.grouped_gemm([ones(2, 3)], [ones(3, 2)], (), [ones(1)]),
        VALUE,
        "expected no lhs_scale_inv for NO_SCALING, got 1",
    ),
    (
        lambda: ops.grouped_gemm([ones(16, 32, dtype=E4M3)], [ones(16, 32, dtype=E4M3)], (), [ones(1)], **GROUP),
        VALUE,
        "expected rhs_scale_inv, one for each of the 1 of lhs, got 0",
    ),
    (lambda: ops.grouped_gemm([ones(2, 2, 3)], [ones(3, 2)]), VALUE, r"expected matrices, got lhs\[0\] of shape"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(3)]), VALUE, r"expected matrices, got rhs\[0\] of shape"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(4, 2)]), VALUE, "contracted elements in rhs as in lhs, 3, got 4"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(3, 2).half()]), TYPE, "expected rhs of dtype torch.float32 as lhs"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(3, 2)], [ones(3)]), VALUE, "as many bias entries .* 2, got 3"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(3, 2)], scaling_mode=7), VALUE, "expected a scaling mode, got 7"),
    (lambda: ops.grouped_gemm([ones(2, 3)], [ones(3, 2)], out_dtype=torch.float16), TYPE, "expected out_dtype"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number, device):
    function, kind, message = ERRORS[number]
    with torch.device(device), pytest.raises(kind, match=r"^grouped_gemm: .*" + message):
        function()


def test_8_bit_outputs_are_of_gemm_alone(data):
    with pytest.raises(TYPE, match=r"^grouped_gemm: expected out_dtype"):
        ops.grouped_gemm([data(16, 16)], [data(16, 16)], out_dtype=E4M3)
