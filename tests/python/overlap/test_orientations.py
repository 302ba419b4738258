"""8-bit operands whose rows are not contiguous along k, by their columnwise data, and swizzled scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, E4M3, PIPELINE, RING, RS, Draw, make, poison
from torch import Tensor

import torch_overlap as to
from torch_overlap.quantize import Quantized, quantize
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.testing import run_ranks

K, N, PART = 64, 256, 128
MX = Mode.MXFP8_1D_SCALING
MODES = [Mode.CURRENT_TENSOR_SCALING, MX, Mode.BLOCK_1D_SCALING]
by_name = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def quantized(x: Tensor, mode: Mode) -> Quantized:
    """Returns a matrix whose magnitudes differ widely along both dimensions, with its columnwise data."""
    far = [2.0 ** torch.arange(n).remainder(9).sub(4) for n in x.shape]
    return quantize((x * far[0][:, None] * far[1]).float(), mode, columnwise=True)


def along(x: Quantized, transposed: bool) -> Tensor:
    """Returns the values used by a product along its rows, or along its columns: [rows, cols] in both cases."""
    return x.transposed().dequantize().double().t() if transposed else x.dequantize().double()


def operand(name: str, x: Quantized, columnwise: bool) -> dict[str, Any]:
    """With `columnwise` the rowwise data only gives the shape: no 8-bit product reads it."""
    given = {f"{name}_scale_inv": x.scale_inv}
    if columnwise:
        given |= {f"{name}_columnwise_data": x.columnwise_data, f"{name}_columnwise_scale_inv": x.columnwise_scale_inv}
        if x.scaling_mode == Mode.CURRENT_TENSOR_SCALING:
            del given[f"{name}_columnwise_scale_inv"]  # the same tensor
    return given


def close(got: Tensor, x: Tensor, w: Tensor, others: list[tuple[Tensor, Tensor]] | None = None) -> None:
    """Checks got [m, n] = x [m, k] w [n, k]^T plus the products of `others`, within the error of sums in fp32."""
    pairs = [(x, w), *(others or [])]
    want = sum(a @ b.t() for a, b in pairs)
    allowed = sum(a.abs() @ b.t().abs() for a, b in pairs) * 2.0**-18 + 1e-30
    assert ((got.double() - want).abs() <= allowed).all()


def gradient_rank(comm: to.TorchComm, seed: int, mode: Mode) -> None:
    """dx = dy w concurrent with a gather, dw = dy^T x concurrent with a sum: no operand of the second is contiguous
    along tokens."""
    rank, size, draw = comm.get_rank(), comm.get_size(), Draw(seed)
    buffer = make(comm, to.CommOverlapType.NONE, BULK, (4 * size, 32), torch.float32)
    dy, x, w = quantized(draw(PART, N), mode), quantized(draw(PART, K), mode), quantized(draw(N, K), mode)
    others = [draw(4 * size, 32, dtype=torch.float32) for _ in range(size)]
    mine = slice(4 * rank, 4 * rank + 4)
    options = {"scaling_mode": mode}

    buffer.copy_into_buffer(others[0][mine], True)
    dx = poison((PART, K), torch.float32)
    buffer.bulk_overlap(w.data, False, dy.data, False, dx, comm_type=AG, **options, **operand("A", w, True),
                        **operand("B", dy, False))  # fmt: skip
    close(dx, along(dy, False), along(w, True).t())
    assert torch.equal(buffer.get_buffer(), others[0])

    buffer.copy_into_buffer(others[rank])
    dw = poison((N, K), torch.float32)
    buffer.bulk_overlap(x.data, False, dy.data, True, dw, comm_type=RS, **options, **operand("A", x, True),
                        **operand("B", dy, True))  # fmt: skip
    close(dw, along(dy, True).t(), along(x, True).t())
    total = sum(other.double() for other in others)[mine]
    torch.testing.assert_close(buffer.get_buffer(True).double(), total, rtol=1e-5, atol=1e-5)


@by_name
def test_gradients_beside_collectives(mode: Mode, seed: int) -> None:
    run_ranks(gradient_rank, 3, seed, mode)


def gather_rank(comm: to.TorchComm, seed: int, mode: Mode, atomic: bool) -> None:
    """all_gather(dy) w, whose weight [n, k] is not contiguous along its inner dimension."""
    rank, size, draw = comm.get_rank(), comm.get_size(), Draw(seed)
    buffer = make(comm, AG, RING, (PART * size, N), E4M3, atomic_gemm=atomic)
    rows = quantized(draw(PART * size, N), mode)
    w = quantized(Draw(seed + 1 + rank)(N, K), mode)
    own = slice(rank * PART, (rank + 1) * PART)
    scales = rows.scale_inv if mode == Mode.CURRENT_TENSOR_SCALING else rows.scale_inv[own].contiguous()
    out = poison((PART * size, K), torch.float32)
    run = buffer.atomic_gemm_overlap_ag if atomic else buffer.split_overlap_ag
    run(w.data, False, rows.data[own], False, out, scaling_mode=mode, B_scale_inv=scales, **operand("A", w, True))
    close(out, along(rows, False), along(w, True).t())


@by_name
@pytest.mark.parametrize("atomic", [False, True])
def test_gathered_rows_by_a_weight_across_k(mode: Mode, atomic: bool, seed: int) -> None:
    run_ranks(gather_rank, 3, seed, mode, atomic)


def scatter_rank(comm: to.TorchComm, seed: int, mode: Mode, method: Any, atomic: bool) -> None:
    """The sum of x^T w; neither operand is contiguous along the inner dimension."""
    rank, size, draw = comm.get_rank(), comm.get_size(), Draw(seed)
    buffer = make(comm, RS, method, (PART * size, N), torch.float32, atomic_gemm=atomic)
    xs = [quantized(draw(K, PART * size), mode) for _ in range(size)]
    ws = [quantized(draw(K, N), mode) for _ in range(size)]
    out = poison((PART, N), torch.float32)
    run = buffer.atomic_gemm_overlap_rs if atomic else buffer.split_overlap_rs
    run(ws[rank].data, False, xs[rank].data, True, None, rs_output=out, scaling_mode=mode,
        **operand("A", ws[rank], True), **operand("B", xs[rank], True))  # fmt: skip
    mine = slice(rank * PART, (rank + 1) * PART)
    (x, w), *others = [(along(x, True)[:, mine].t(), along(w, True).t()) for x, w in zip(xs, ws, strict=True)]
    close(out, x, w, others)


@by_name
@pytest.mark.parametrize("method", [RING, PIPELINE], ids=lambda method: method.name)
@pytest.mark.parametrize("atomic", [False, True])
def test_sums_of_operands_across_k(mode: Mode, method: Any, atomic: bool, seed: int) -> None:
    run_ranks(scatter_rank, 2, seed, mode, method, atomic)


def swizzled_rank(comm: to.TorchComm, seed: int) -> None:
    """A weight may have swizzled scales; rows too, if nothing is gathered."""
    rank, size, draw = comm.get_rank(), comm.get_size(), Draw(seed)
    xs = [quantized(draw(PART * size, K), MX) for _ in range(size)]
    ws = [quantized(draw(N, K), MX) for _ in range(size)]
    x, w = xs[rank], ws[rank]
    tiles = {"scaling_mode": MX, "A_scale_inv": to.ops.swizzle_scales(w.scale_inv), "A_scales_swizzled": True}
    across = {"A_columnwise_data": w.columnwise_data, "A_scales_swizzled": True, "scaling_mode": MX,
              "A_columnwise_scale_inv": to.ops.swizzle_scales(w.columnwise_scale_inv)}  # fmt: skip
    of_rows = {"B_scale_inv": to.ops.swizzle_scales(x.scale_inv), "B_scales_swizzled": True}

    gather = make(comm, AG, RING, (PART * size, K), E4M3)
    own, out = slice(rank * PART, (rank + 1) * PART), poison((PART * size, N), torch.float32)
    gather.split_overlap_ag(w.data, True, xs[0].data[own], False, out, B_scale_inv=xs[0].scale_inv[own].contiguous(),
                            **tiles)  # fmt: skip
    close(out, along(xs[0], False), along(w, False))

    (first, weight), *others = [(along(x, False)[own], along(w, False)) for x, w in zip(xs, ws, strict=True)]
    for method in (RING, PIPELINE):
        scatter = make(comm, RS, method, (PART * size, N), torch.float32)
        part = poison((PART, N), torch.float32)
        scatter.split_overlap_rs(w.data, True, x.data, False, None, rs_output=part, **tiles, **of_rows)
        close(part, first, weight, others)

    beside = make(comm, AG, BULK, (4 * size, 32), torch.float32)
    dy, dx = quantized(draw(PART, N), MX), poison((PART, K), torch.float32)
    beside.bulk_overlap(w.data, False, dy.data, False, dx, comm_type=AG, B_scales_swizzled=True,
                        B_scale_inv=to.ops.swizzle_scales(dy.scale_inv), **across)  # fmt: skip
    close(dx, along(dy, False), along(w, True).t())


def test_scales_in_the_order_of_tensor_cores(seed: int) -> None:
    run_ranks(swizzled_rank, 2, seed)


def refused_rank(comm: to.TorchComm) -> None:
    size, draw = comm.get_size(), Draw(0)
    w, x = quantized(draw(N, K), MX), quantized(draw(PART, N), MX)
    buffer = make(comm, AG, RING, (PART * size, N), E4M3)
    out = torch.empty(PART * size, K)

    def call(b: dict[str, Any], **a: Any) -> None:
        buffer.split_overlap_ag(w.data, False, x.data, False, out, scaling_mode=MX, A_scale_inv=w.scale_inv, **a, **b)

    rows = {"B_scale_inv": x.scale_inv}
    with pytest.raises(to.InvalidValueError, match=r"^split_overlap_ag: .*columnwise_data of rhs.*columnwise=True"):
        call(rows)
    with pytest.raises(to.InvalidValueError, match=r"columnwise_data of rhs of 8 bits and shape \[64, 256\], got "):
        call(rows, A_columnwise_data=w.data)
    columns = {"A_columnwise_data": w.columnwise_data, "A_columnwise_scale_inv": w.columnwise_scale_inv}
    with pytest.raises(to.UnsupportedError, match="got swizzled ones; use unswizzle_scales"):
        call({"B_scale_inv": to.ops.swizzle_scales(x.scale_inv), "B_scales_swizzled": True}, **columns)
    with pytest.raises(to.InvalidValueError, match="scale_inv of rhs"):
        call(rows, A_columnwise_data=w.columnwise_data)  # for blocks these differ from those of the rows
    call(rows, **columns)


def test_orientations_that_do_not_fit() -> None:
    run_ranks(refused_rank, 2)
