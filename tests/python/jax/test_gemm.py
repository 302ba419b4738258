"""gemm on one device: epilogues, boundaries, scales, dtypes, gradients, empty operands, errors."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_checks import TOLERANCE

import torch_overlap_jax as toj

Mode = toj.ScalingMode


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def close(got, expected, dtype=None):
    tolerance = TOLERANCE[dtype or got.dtype.name] * max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), expected, rtol=0, atol=tolerance)


def rounded(values, dtype):
    """Returns values that the dtype has, in float64."""
    return np.asarray(jnp.asarray(values).astype(dtype)).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_forward_epilogues(rng, dtype):
    x, w, b = (rounded(rng.standard_normal(shape), dtype) for shape in ((5, 3, 8), (6, 8), (6,)))
    lhs, rhs, bias = (jnp.asarray(value, dtype) for value in (x, w, b))
    for fuse_bias, fuse_gelu in itertools.product((False, True), repeat=2):
        out = jax.jit(
            lambda lhs, rhs, bias: toj.gemm(
                lhs,
                rhs,
                bias=bias if fuse_bias else None,  # noqa: B023
                fuse_bias=fuse_bias,  # noqa: B023
                fuse_gelu=fuse_gelu,  # noqa: B023
                rhs_transposed=True,
            )
        )(lhs, rhs, bias)
        before = x @ w.T + (b if fuse_bias else 0)
        assert out.output.dtype == lhs.dtype
        close(out.output, np.asarray(jax.nn.gelu(before, approximate=True)) if fuse_gelu else before)
        assert out.pre_gelu_out.shape == (before.shape if fuse_gelu else (0,))
        if fuse_gelu:
            close(out.pre_gelu_out, before)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradient_epilogues(rng, dtype):
    dy, w, h = (rounded(rng.standard_normal(shape), dtype) for shape in ((7, 6), (6, 8), (7, 8)))
    slope = np.asarray(jax.vjp(lambda h: jax.nn.gelu(h, approximate=True), jnp.asarray(h))[1](jnp.ones((7, 8)))[0])
    grad, weight, hidden = (jnp.asarray(value, dtype) for value in (dy, w, h))
    out = toj.gemm(grad, weight, gelu_input=hidden, fuse_gelu=True, fuse_bias=True, grad=True)
    close(out.output, (dy @ w) * slope)
    close(out.bias_grad, ((dy @ w) * slope).sum(0), dtype)
    out = toj.gemm(grad, hidden, lhs_transposed=True, fuse_bias=True, grad=True)
    close(out.output, dy.T @ h)
    close(out.bias_grad, dy.sum(0))


def test_axis_boundaries_and_transposes(rng):
    lhs, rhs = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((4, 5, 6, 7))
    flat, other = lhs.reshape(6, 20), rhs.reshape(20, 42)
    out = toj.gemm(lhs, rhs, lhs_axis_boundary=2, rhs_axis_boundary=2).output
    close(out, (flat @ other).reshape(2, 3, 6, 7))
    out = toj.gemm(
        flat.T.reshape(4, 5, 2, 3), rhs, lhs_axis_boundary=2, rhs_axis_boundary=-2, lhs_transposed=True
    ).output
    close(out, (flat @ other).reshape(2, 3, 6, 7))
    out = toj.gemm(
        lhs, other.T.reshape(6, 7, 4, 5), lhs_axis_boundary=2, rhs_axis_boundary=2, rhs_transposed=True
    ).output
    close(out, (flat @ other).reshape(2, 3, 6, 7))


@pytest.mark.parametrize("gelu", [False, True])
def test_gradients(rng, gelu):
    x, w, b = rng.standard_normal((2, 5, 4)), rng.standard_normal((6, 4)), rng.standard_normal(6)

    def ours(x, w, b):
        out = toj.gemm(x, w, bias=b, fuse_bias=True, fuse_gelu=gelu, rhs_transposed=True).output
        return jnp.sin(out).sum()

    def plain(x, w, b):
        out = x @ w.T + b
        return jnp.sin(jax.nn.gelu(out, approximate=True) if gelu else out).sum()

    for got, expected in zip(jax.grad(ours, (0, 1, 2))(x, w, b), jax.grad(plain, (0, 1, 2))(x, w, b), strict=True):
        close(got, np.asarray(expected))


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", [Mode.CURRENT_TENSOR_SCALING, Mode.DELAYED_TENSOR_SCALING])
def test_tensor_scaling(rng, mode, out_dtype):
    x, w = (rounded(rng.standard_normal(shape), jnp.float8_e4m3fn) for shape in ((8, 32), (16, 32)))
    b = rounded(rng.standard_normal(16), jnp.bfloat16)
    out = toj.gemm(
        jnp.asarray(x, jnp.float8_e4m3fn),
        jnp.asarray(w, jnp.float8_e4m3fn),
        lhs_scale_inv=jnp.full((1,), 0.5, jnp.float32),
        rhs_scale_inv=jnp.full((1,), 4.0, jnp.float32),
        bias=jnp.asarray(b, jnp.bfloat16),
        fuse_bias=True,
        scaling_mode=mode,
        rhs_transposed=True,
        use_split_accumulator=True,
        out_dtype=out_dtype,
    ).output
    assert out.dtype == out_dtype
    close(out, 2 * (x @ w.T) + b)


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "uint8"])
def test_mxfp8(rng, scale_dtype):
    rows, columns, k = 24, 16, 128
    x, w = (rounded(rng.standard_normal(shape), jnp.float8_e4m3fn) for shape in ((rows, k), (columns, k)))
    powers = [rng.integers(-3, 4, (length, k // 32)) for length in (rows, columns)]
    scales = [jnp.asarray(power + 127, jnp.uint8) for power in powers]
    if scale_dtype != "uint8":
        scales = [jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu) for scale in scales]
    out = toj.gemm(
        jnp.asarray(x, jnp.float8_e4m3fn),
        jnp.asarray(w, jnp.float8_e4m3fn),
        lhs_scale_inv=scales[0],
        rhs_scale_inv=scales[1],
        scaling_mode=Mode.MXFP8_1D_SCALING,
        rhs_transposed=True,
        out_dtype=jnp.float32,
    )
    values = [value * np.repeat(2.0**power, 32, axis=1) for value, power in zip((x, w), powers, strict=True)]
    close(out.output, values[0] @ values[1].T)
    # The swizzled order: tiles of 128 rows and 4 blocks, of which a row is 32 x 4 x 4 bytes.
    bytes_of = np.zeros((128, 4), np.uint8)
    bytes_of[:rows] = powers[0] + 127
    expected = bytes_of.reshape(4, 32, 4).transpose(1, 0, 2).reshape(128, 4)
    got = np.asarray(out.lhs_swizzled).view(np.uint8)
    np.testing.assert_array_equal(got, expected)


def test_empty_operands(rng):
    w = rng.standard_normal((4, 6))
    assert toj.gemm(jnp.zeros((0, 4)), w).output.shape == (0, 6)
    close(toj.gemm(jnp.zeros((3, 0)), jnp.zeros((0, 6))).output, np.zeros((3, 6)))
    assert toj.gemm(jnp.zeros((3, 4)), jnp.zeros((4, 0))).output.shape == (3, 0)


def test_vmap_is_refused(rng):
    with pytest.raises(NotImplementedError, match=r"gemm: expected no vmap, got one over 3 elements\. Put the batch"):
        jax.vmap(lambda x: toj.gemm(x, jnp.ones((4, 6))).output)(jnp.ones((3, 2, 4)))


def test_what_does_not_fit_is_named():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 6))
    with pytest.raises(ValueError, match="gemm: expected as many contracted elements in rhs as in lhs, 4, got 5"):
        toj.gemm(x, w)
    with pytest.raises(ValueError, match=r"gemm: expected lhs_axis_boundary in \[-2, 2\], got 3"):
        toj.gemm(x, w, lhs_axis_boundary=3)
    with pytest.raises(ValueError, match="an invalid collective type"):
        toj.gemm(x, jnp.ones((4, 6)), comm_type=7)
    with pytest.raises(ValueError, match="expected comm_overlap_id to be the id of a live buffer, got 77"):
        toj.gemm(x, jnp.ones((4, 6)), comm_type=1, comm_overlap_id=77)


def test_errors_of_the_handler_reach_python():
    x, w = jnp.ones((3, 4)), jnp.ones((4, 6))
    for match, call in {
        "gemm: expected a bias for fuse_bias, got none": lambda: toj.gemm(x, w, fuse_bias=True),
        "expected rhs of dtype .* as lhs, got .*; convert one of them": lambda: toj.gemm(x, w.astype(jnp.float32)),
        "Missing inverse scaling factor": lambda: toj.gemm(
            x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), scaling_mode=Mode.CURRENT_TENSOR_SCALING
        ),
        "expected gelu_input for fuse_gelu with grad": lambda: toj.gemm(x, w, fuse_gelu=True, grad=True),
    }.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            jax.block_until_ready(jax.jit(call)())


def test_gradients_that_do_not_exist_say_so():
    x = jnp.ones((16, 16), jnp.float32)
    with pytest.raises(NotImplementedError, match="gemm: expected NO_SCALING and grad=False where a gradient is asked"):
        jax.grad(lambda x: toj.gemm(x, x, fuse_bias=True, grad=True).output.sum())(x)


def test_gradients_of_all_results(rng):
    """The input of GELU is a result, too; also gradients of gradients."""
    x, w, b = (jnp.asarray(rng.standard_normal(shape)) for shape in ((3, 4), (4, 5), (5,)))

    def loss(out, before):
        return (jnp.sin(out) ** 2).sum() + (before**3).sum()

    def ours(x, w, b):
        results = toj.gemm(x, w, bias=b, fuse_bias=True, fuse_gelu=True)
        return loss(results.output, results.pre_gelu_out)

    def plain(x, w, b):
        before = x @ w + b
        return loss(jax.nn.gelu(before, approximate=True), before)

    for got, want in zip(jax.grad(ours, (0, 1, 2))(x, w, b), jax.grad(plain, (0, 1, 2))(x, w, b), strict=True):
        close(got, np.asarray(want))
    got, want = (jax.grad(lambda x, f=f: jnp.sum(jax.grad(f)(x, w, b) ** 2))(x) for f in (ours, plain))
    close(got, np.asarray(want))


@pytest.mark.parametrize("shapes", [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 0))])
def test_gradients_of_empty_products(shapes):
    x, w = (jnp.ones(shape) for shape in shapes)
    got, want = (
        jax.grad(f, (0, 1))(x, w) for f in (lambda x, w: toj.gemm(x, w).output.sum(), lambda x, w: (x @ w).sum())
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
