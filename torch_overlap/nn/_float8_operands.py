"""The 8-bit matrices of a layer's products, and what of them travels for the gradients of weights.

Products run along contiguous rows of both operands, so what takes part in two of them is there twice, as it lies and as
its columns, the transpose:

    y  = x w^T     along in      x [rows, in]       w [out, in]
    dx = dy w      along out     dy [rows, out]     w^T [in, out]
    dw = dy^T x    along rows    dy^T [out, rows]   x^T [in, rows]

With one factor for a tensor both have the same 8-bit values, and dw takes the transpose of gathered rows. With scales
of blocks, which lie along what a product sums, the columns are quantized from the values themselves; each rank fills
those of its own rows up with zeros to whole blocks, and they are gathered with their scales, apart from the rows of y
or dx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap import ops
from torch_overlap._C import ScalingMode
from torch_overlap.nn._float8_products import Plan, Scaled, begin_gather
from torch_overlap.nn.float8 import Float8State

_ops = torch.ops.torch_overlap


class Operand(NamedTuple):
    """A matrix in 8 bits, or several side by side, and its transpose; value = data * scale_inv."""

    data: Tensor
    scale_inv: Tensor
    columns: Tensor | None
    columns_scale_inv: Tensor | None

    @property
    def rows(self) -> Scaled:
        return self.data, self.scale_inv

    @property
    def transposed(self) -> Scaled:
        assert self.columns is not None
        assert self.columns_scale_inv is not None
        return self.columns, self.columns_scale_inv

    def kept(self, plan: Plan) -> Scaled:
        """Of rows that ranks share: what the gradient of a weight needs of all of them."""
        return self.transposed if plan.block else self.rows


# --- Quantization -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_forward(
    plan: Plan, state: Float8State, x: Tensor, weights: Sequence[Tensor], *, x_columns: bool, w_columns: bool,
    ranks: int,
) -> tuple[Operand, Operand]:  # fmt: skip
    """x, which has the rows of `ranks` ranks, and all weights as one."""
    dtype = state.dtype("forward")
    if plan.block:
        return (_with_blocks([x], plan.mode_of_rows, plan.block, dtype, 1, x_columns, ranks),
                _with_blocks(weights, plan.mode, plan.block, dtype, 0, w_columns))  # fmt: skip
    scale = state.scales("forward", [[x], weights])
    mine, x_amax = _with_one_factor([x], scale[:1], dtype, 0, x_columns)
    weight, weight_amax = _with_one_factor(weights, scale[1:], dtype, 0, w_columns)
    if plan.is_training:
        state.note("forward", [x_amax, weight_amax])
    return mine, weight


@torch.no_grad()
def quantize_backward(
    plan: Plan, state: Float8State, grads: Sequence[Tensor], *, columnwise: bool, ranks: int
) -> Operand:
    """The gradients of outputs side by side, which have the rows of `ranks` ranks."""
    dtype = state.dtype("backward")
    grads = [g.contiguous() for g in grads]
    if plan.block:
        return _with_blocks(grads, plan.mode_of_rows, plan.block, dtype, 1, columnwise, ranks)
    operand, amax = _with_one_factor(grads, state.scales("backward", [grads]), dtype, -1, columnwise)
    state.note("backward", [amax])
    return operand


def _with_one_factor(
    parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, dim: int, columnwise: bool
) -> tuple[Operand, Tensor]:
    """`parts`, concatenated along `dim`, 0 or -1; and their largest magnitude."""
    found = [ops.quantize_delayed(part, scale, dtype, columnwise=columnwise) for part in parts]
    data, scale_inv, columns, amax = found[0]
    if len(found) > 1:
        data = _concatenated([part[0] for part in found], dim)
        amax = torch.cat([part[3] for part in found]).amax()
        if columnwise:
            columns = _concatenated([part[2] for part in found], 1 if dim == 0 else 0)
    return Operand(data, scale_inv, *((columns, scale_inv) if columnwise else (None, None))), amax


def _with_blocks(parts: Sequence[Tensor], mode: ScalingMode, block: int, dtype: torch.dtype, dim: int, columnwise: bool,
                 ranks: int | None = None) -> Operand:  # fmt: skip
    """`parts` [rows, features], concatenated along `dim`. ranks: of as many ranks the rows are; None: of a weight."""
    found = [_blocks_of(part.contiguous(), mode, block, dtype, columnwise, ranks) for part in parts]
    if len(found) == 1:
        return found[0]
    # Features along which a product sums begin with a block in each part.
    data = _concatenated([_filled(one.data, block) if dim == 1 else one.data for one in found], dim)
    scale_inv = _concatenated([one.scale_inv for one in found], dim)
    if not columnwise:
        return Operand(data, scale_inv, None, None)
    columns = [one.transposed[0] for one in found]
    return Operand(data, scale_inv,
                   _concatenated([_filled(one, block) if dim == 0 else one for one in columns], 1 - dim),
                   _concatenated([one.transposed[1] for one in found], 1 - dim))  # fmt: skip


def _blocks_of(
    x: Tensor, mode: ScalingMode, block: int, dtype: torch.dtype, columnwise: bool, ranks: int | None
) -> Operand:
    rest = 0 if ranks is None else -(x.size(0) // ranks) % block
    data, scale_inv, columns, column_scales = ops.quantize(x, mode, dtype, columnwise=columnwise and rest == 0)
    if not columnwise:
        return Operand(data, scale_inv, None, None)
    if ranks is not None and rest != 0:
        filled = F.pad(x.unflatten(0, (ranks, -1)), (0, 0, 0, rest)).flatten(0, 1)
        columns, column_scales, _, _ = ops.quantize(filled.t().contiguous(), mode, dtype)
    return Operand(data, scale_inv, columns, column_scales)


def _filled(data: Tensor, block: int) -> Tensor:
    """Rows of whole blocks, which end with zeros."""
    rest = -data.size(1) % block
    return data if rest == 0 else F.pad(data.view(torch.uint8), (0, rest)).view(data.dtype)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """As bytes: autocast knows no 8-bit floats."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(dtype)


def weights_of(plan: Plan, data: Tensor, scale_inv: Tensor) -> list[Scaled]:
    """Each of the weights that were quantized as one."""
    parts = data.split(plan.sizes)
    if not plan.block:
        return [(part, scale_inv) for part in parts]
    height = plan.block if plan.mode == ScalingMode.BLOCK_2D_SCALING else 1
    return list(zip(parts, scale_inv.split([-(-size // height) for size in plan.sizes]), strict=True))


# --- What the gradient of a weight needs of other ranks' rows ---------------------------------------------------------


def begin_kept(plan: Plan, kept: Scaled) -> list[Tensor]:
    """All ranks' `kept`, behind `gathered_kept`."""
    data, scale_inv = kept
    if not plan.block:
        return [begin_gather(plan, data, plan.dim)]
    data = begin_gather(plan, data.view(torch.uint8), 1)
    if plan.mode == ScalingMode.MXFP8_1D_SCALING:  # as bytes: not every backend knows the type
        return [data, begin_gather(plan, scale_inv.view(torch.uint8), 1)]
    return [data, begin_gather(plan, scale_inv.t(), 0)]  # as they lie


def gathered_kept(plan: Plan, begun: Sequence[Tensor], kept: Scaled) -> Scaled:
    data, *scales = (_ops.wait_tensor(t) for t in begun)
    if not plan.block:
        return data, kept[1]
    is_mx = plan.mode == ScalingMode.MXFP8_1D_SCALING
    return data.view(kept[0].dtype), scales[0].view(kept[1].dtype) if is_mx else scales[0].t()


def columns_of(plan: Plan, kept: Scaled) -> Scaled:
    return kept if plan.block else (kept[0].flatten(0, -2).t().contiguous(), kept[1])
