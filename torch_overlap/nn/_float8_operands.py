"""The 8-bit matrices of a layer's products, and their communication for the gradients of weights.

Products need both operands K-major, so a matrix that is an operand of two products is stored twice: as it is, and
transposed, as its columns:

    y  = x w^T     along in      x [rows, in]       w [out, in]
    dx = dy w      along out     dy [rows, out]     w^T [in, out]
    dw = dy^T x    along rows    dy^T [out, rows]   x^T [in, rows]

With one scale per tensor both have the same 8-bit values, and dw transposes the gathered rows. Block scales run along
the dimension that a product sums over, so the columns are quantized from the original values. Each rank pads the
columns of its own rows with zeros to whole blocks, and they are gathered with their scales, separately from the rows of
y or dx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap import ops
from torch_overlap._C import ScalingMode
from torch_overlap.nn._float8_gemms import Plan, Scaled, start_all_gather
from torch_overlap.nn.float8 import Float8State

_ops = torch.ops.torch_overlap


class Operand(NamedTuple):
    """One or several concatenated matrices in 8 bits, and the transpose; value = data * scale_inv.

    columns_scale_inv: None if it is scale_inv. (Dynamo of torch 2.15 passes no tensor twice to a function.)
    """

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
        return self.columns, self.scale_inv_of_columns

    @property
    def scale_inv_of_columns(self) -> Tensor:
        return self.scale_inv if self.columns_scale_inv is None else self.columns_scale_inv

    def kept(self, plan: Plan) -> Scaled:
        """Returns the part of sharded rows that the gradient of a weight needs from all ranks."""
        return self.transposed if plan.block else self.rows


# --- Quantization -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_forward(
    plan: Plan, state: Float8State, x: Tensor, weights: Sequence[Tensor], *, x_columns: bool, w_columns: bool,
    ranks: int,
) -> tuple[Operand, Operand]:  # fmt: skip
    """Quantizes x, which has the rows of `ranks` ranks, and all weights as one."""
    dtype = state.dtype("forward")
    if plan.block:
        return (_with_block_scales([x], plan.rowwise_mode, plan.block, dtype, 1, x_columns, ranks),
                _with_block_scales(weights, plan.mode, plan.block, dtype, 0, w_columns))  # fmt: skip
    scale = state.scales("forward", [[x], weights])
    mine, x_amax = _with_tensor_scale([x], scale[:1], dtype, 0, x_columns)
    weight, weight_amax = _with_tensor_scale(weights, scale[1:], dtype, 0, w_columns)
    if plan.is_training:
        state.note("forward", [x_amax, weight_amax])
    return mine, weight


@torch.no_grad()
def quantize_backward(
    plan: Plan, state: Float8State, grads: Sequence[Tensor], *, columnwise: bool, ranks: int
) -> Operand:
    """Quantizes the concatenated gradients of outputs, which have the rows of `ranks` ranks."""
    dtype = state.dtype("backward")
    grads = [g.contiguous() for g in grads]
    if plan.block:
        return _with_block_scales(grads, plan.rowwise_mode, plan.block, dtype, 1, columnwise, ranks)
    operand, amax = _with_tensor_scale(grads, state.scales("backward", [grads]), dtype, -1, columnwise)
    state.note("backward", [amax])
    return operand


def _with_tensor_scale(
    parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, dim: int, columnwise: bool
) -> tuple[Operand, Tensor]:
    """Quantizes `parts`, concatenated along `dim`, 0 or -1; also returns their largest magnitude."""
    found = [ops.quantize_delayed(part, scale, dtype, columnwise=columnwise) for part in parts]
    data, scale_inv, columns, amax = found[0]
    if len(found) > 1:
        data = _concatenated([part[0] for part in found], dim)
        amax = torch.cat([part[3] for part in found]).amax()
        if columnwise:
            columns = _concatenated([part[2] for part in found], 1 if dim == 0 else 0)
    return Operand(data, scale_inv, columns if columnwise else None, None), amax


def _with_block_scales(parts: Sequence[Tensor], mode: ScalingMode, block: int, dtype: torch.dtype, dim: int,
                       columnwise: bool, ranks: int | None = None) -> Operand:  # fmt: skip
    """Quantizes `parts` [rows, features], concatenated along `dim`. ranks: the number of ranks that the rows belong to;
    None for a weight."""
    found = [_quantize_blocks(part.contiguous(), mode, block, dtype, columnwise, ranks) for part in parts]
    if len(found) == 1:
        return found[0]
    # Features that a product sums over start at a block boundary in each part.
    data = _concatenated([_padded_to_blocks(one.data, block) if dim == 1 else one.data for one in found], dim)
    scale_inv = _concatenated([one.scale_inv for one in found], dim)
    if not columnwise:
        return Operand(data, scale_inv, None, None)
    columns = [one.transposed[0] for one in found]
    return Operand(data, scale_inv,
                   _concatenated([_padded_to_blocks(one, block) if dim == 0 else one for one in columns], 1 - dim),
                   _concatenated([one.transposed[1] for one in found], 1 - dim))  # fmt: skip


def _quantize_blocks(
    x: Tensor, mode: ScalingMode, block: int, dtype: torch.dtype, columnwise: bool, ranks: int | None
) -> Operand:
    rest = 0 if ranks is None else -(x.size(0) // ranks) % block
    data, scale_inv, columns, column_scales = ops.quantize(x, mode, dtype, columnwise=columnwise and rest == 0)
    if not columnwise:
        return Operand(data, scale_inv, None, None)
    if ranks is not None and rest != 0:
        padded = F.pad(x.unflatten(0, (ranks, -1)), (0, 0, 0, rest)).flatten(0, 1)
        columns, column_scales, _, _ = ops.quantize(padded.t().contiguous(), mode, dtype)
    return Operand(data, scale_inv, columns, column_scales)


def _padded_to_blocks(data: Tensor, block: int) -> Tensor:
    """Pads rows with zeros to whole blocks."""
    rest = -data.size(1) % block
    return data if rest == 0 else F.pad(data.view(torch.uint8), (0, rest)).view(data.dtype)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates as bytes: autocast does not support 8-bit floats."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(dtype)


def weights_of(plan: Plan, data: Tensor, scale_inv: Tensor) -> list[Scaled]:
    """Returns each of the weights that were quantized as one."""
    parts = data.split(plan.sizes)
    if not plan.block:
        return [(part, scale_inv) for part in parts]
    height = plan.block if plan.mode == ScalingMode.BLOCK_2D_SCALING else 1
    return list(zip(parts, scale_inv.split([-(-size // height) for size in plan.sizes]), strict=True))


# --- Communication for the gradients of weights
# ------------------------------------------------------------------------


def start_gather_for_backward(plan: Plan, kept: Scaled) -> list[Tensor]:
    """Starts the gather of all ranks' `kept`; pass the result to `wait_gather_for_backward`."""
    data, scale_inv = kept
    if not plan.block:
        return [start_all_gather(plan, data, plan.dim)]
    data = start_all_gather(plan, data.view(torch.uint8), 1)
    if plan.mode == ScalingMode.MXFP8_1D_SCALING:  # sent as bytes: not every backend supports the dtype
        return [data, start_all_gather(plan, scale_inv.view(torch.uint8), 1)]
    return [data, start_all_gather(plan, scale_inv.t(), 0)]  # scales in their memory order


def wait_gather_for_backward(plan: Plan, pending_gathers: Sequence[Tensor], kept: Scaled) -> Scaled:
    data, *scales = (_ops.wait_tensor(t) for t in pending_gathers)
    if not plan.block:
        return data, kept[1]
    is_mx = plan.mode == ScalingMode.MXFP8_1D_SCALING
    return data.view(kept[0].dtype), scales[0].view(kept[1].dtype) if is_mx else scales[0].t()


def columns_of(plan: Plan, kept: Scaled) -> Scaled:
    return kept if plan.block else (kept[0].flatten(0, -2).t().contiguous(), kept[1])
