"""gemm, grouped_gemm and quantization of operands without elements, with any strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap.gemm import ScalingMode as Mode

K, N = 128, 16
STRIDED: dict[str, Callable[[int, int], Tensor]] = {
    "column stride": lambda r, c: torch.empty(r, 2 * c)[:, ::2],
    "transposed": lambda r, c: torch.empty(c, r).t(),
    "no strides": lambda r, c: torch.empty(0).as_strided((r, c), (0, 0)),
}
MODES = (Mode.CURRENT_TENSOR_SCALING, Mode.ROW_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING,
         Mode.MXFP8_1D_SCALING)  # fmt: skip


@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize("lhs_transposed", [False, True])
@pytest.mark.parametrize("rhs_transposed", [False, True])
def test_plain_products(strides: str, lhs_transposed: bool, rhs_transposed: bool) -> None:
    make, bias = STRIDED[strides], torch.randn(N)
    for m, n, k in ((0, N, K), (4, 0, K), (4, N, 0), (0, 0, 0), (0, N, 0)):
        sizes = ((k, m) if lhs_transposed else (m, k), (n, k) if rhs_transposed else (k, n))
        lhs, rhs = (make(*s) if 0 in s else torch.ones(*s) for s in sizes)
        flags = {"lhs_transposed": lhs_transposed, "rhs_transposed": rhs_transposed}
        y, _, pre, _ = ops.gemm(lhs, None, rhs, None, bias[:n], fuse_bias=True, fuse_gelu=True, **flags)
        assert y.shape == (m, n)
        torch.testing.assert_close(pre, bias[:n].expand(m, n))
        one, two = ops.grouped_gemm([lhs, lhs], [rhs, rhs], [bias[:n], None], **flags)
        torch.testing.assert_close(one, bias[:n].expand(m, n))
        torch.testing.assert_close(two, torch.zeros(m, n))
        # If the output has no elements, the strides of the tensors stored with it do not matter either.
        if m == 0:
            given = make(m, n)
            _, bias_grad, *_ = ops.gemm(lhs, None, rhs, None, None, given, fuse_bias=True, fuse_gelu=True, grad=True,
                                        **flags)  # fmt: skip
            torch.testing.assert_close(bias_grad, torch.zeros(n))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("columnwise", [False, True])
def test_quantization(mode: Mode, columnwise: bool) -> None:
    for make in STRIDED.values():
        for shape in ((0, K), (K, 0), (0, 0)):
            x = make(*shape)
            data, scale, columns, column_scale = ops.quantize(x, mode, columnwise=columnwise)
            meta = ops.quantize(x.to("meta"), mode, columnwise=columnwise)
            for got, want in zip((data, scale, columns, column_scale), meta, strict=True):
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert ops.dequantize(data, scale, mode).shape == x.shape
            if mode == Mode.CURRENT_TENSOR_SCALING:
                assert torch.equal(scale, torch.ones(1))
    three = torch.empty(2, 0, K)
    assert ops.quantize(three, mode)[0].shape == three.shape


def test_delayed_quantization() -> None:
    for make in STRIDED.values():
        data, scale_inv, columns, amax = ops.quantize_delayed(make(0, K), torch.full((1,), 4.0), columnwise=True)
        assert (data.shape, columns.shape, amax.item(), scale_inv.item()) == ((0, K), (K, 0), 0.0, 0.25)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_scaled_products(mode: Mode) -> None:
    of_rows = Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
    for make in STRIDED.values():
        for m, n, k in ((0, N, K), (8, 0, K), (8, N, 0)):
            lhs, lhs_scale, *_ = ops.quantize(torch.ones(m, k), of_rows)
            rhs, rhs_scale, *_ = ops.quantize(torch.ones(n, k), mode)
            lhs = make(m, k).to(lhs.dtype) if 0 in (m, k) else lhs
            rhs = make(n, k).to(rhs.dtype) if 0 in (n, k) else rhs
            y, *_ = ops.gemm(lhs, lhs_scale, rhs, rhs_scale, scaling_mode=mode, rhs_transposed=True)
            assert y.shape == (m, n)
            assert not y.any()
