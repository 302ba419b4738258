"""The products of layers on MXFP8. Gradients of the first order only.

Each 32 elements along which a product sums share a scale, so what takes part in two products is quantized for each from
the values themselves, as rows and as columns:

    y  = x w^T     along in      x [rows, in]       w [out, in]
    dx = dy w      along out     dy [rows, out]     w^T [in, out]
    dw = dy^T x    along rows    dy^T [out, rows]   x^T [in, rows]

8-bit data travel with their scales. For dw each rank quantizes the columns of its own rows, filled up with zeros to
blocks of 32, so that a block belongs to one rank; they are gathered apart from the rows that y or dx needs.

Here x and y are matrices whose rows are in the order of the ranks, along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_overlap import ops
from torch_overlap._C import ScalingMode
from torch_overlap.nn._float8_products import (
    Plan,
    Scaled,
    begin_gather,
    bias_grad,
    concatenated,
    gather_products,
    materialized,
    product,
    product_scatter,
)
from torch_overlap.nn.float8 import Float8State

_ops = torch.ops.torch_overlap
_MODE = ScalingMode.MXFP8_1D_SCALING
_BLOCK = 32


class _Operand(NamedTuple):
    """A matrix, or several side by side, as 8-bit rows; and, quantized anew, its transpose."""

    data: Tensor
    scale_inv: Tensor
    columns: Tensor | None
    columns_scale_inv: Tensor | None

    @property
    def transposed(self) -> Scaled:
        assert self.columns is not None
        assert self.columns_scale_inv is not None
        return self.columns, self.columns_scale_inv


def column_products(
    plan: Plan, state: Float8State, keep_gathered: bool, x: Tensor, weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    """linear(all_gather(x), w, b) for each of this rank's weights and biases."""
    grad, dtype = torch.is_grad_enabled(), state.dtype("forward")
    rows = _to_rows(x, plan.dim)
    mine = _quantize([rows], dtype, 0, columnwise=grad and any(w.requires_grad for w in weights))
    weight = _quantize(weights, dtype, 0, columnwise=grad and x.requires_grad)
    outputs: tuple[Tensor, ...] = _Column.apply(  # type: ignore[no-untyped-call]
        _of_rows(plan), state, keep_gathered, *mine, *weight, rows, *weights, *biases
    )
    return [_from_rows(y, x, plan.dim, plan.size, 1) for y in outputs[: len(weights)]]


def row_product(plan: Plan, state: Float8State, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """reduce_scatter(linear(x, weight)) + bias."""
    grad, dtype = torch.is_grad_enabled(), state.dtype("forward")
    rows = _to_rows(x, plan.dim)
    mine = _quantize([rows], dtype, 0, columnwise=grad and weight.requires_grad, groups=_groups(plan))
    other = _quantize([weight], dtype, 0, columnwise=grad and x.requires_grad)
    output: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
        _of_rows(plan), state, *mine, *other, rows, weight, bias
    )
    return _from_rows(output, x, plan.dim, 1, plan.size)


def _of_rows(plan: Plan) -> Plan:
    return plan if plan.dim is None else plan._replace(dim=0)


def _groups(plan: Plan) -> int:
    """Whose rows a whole matrix has: of how many ranks."""
    return 1 if plan.dim is None else plan.size


def _to_rows(x: Tensor, dim: int | None) -> Tensor:
    """[rows, features], where `dim` changes slowest."""
    return (x if dim is None else x.movedim(dim, 0)).flatten(0, -2).contiguous()


def _from_rows(rows: Tensor, x: Tensor, dim: int | None, times: int, parts: int) -> Tensor:
    """The shape of x but for the features, and for `dim`, which has `times` / `parts` as many rows."""
    if dim is None:
        return rows.view(*x.shape[:-1], rows.size(-1))
    first, *others = x.movedim(dim, 0).shape[:-1]
    return rows.view(first * times // parts, *others, rows.size(-1)).movedim(0, dim).contiguous()


@torch.no_grad()
def _quantize(parts: Sequence[Tensor], dtype: torch.dtype, dim: int, *, columnwise: bool, groups: int = 1) -> _Operand:
    """`parts` [rows, features], concatenated along `dim`. groups: of as many ranks the rows are."""
    found = [_quantized(part.contiguous(), dtype, columnwise, groups) for part in parts]
    if len(found) == 1:
        return found[0]
    data = concatenated([one.data for one in found], dim)
    scale_inv = concatenated([one.scale_inv for one in found], dim)
    if not columnwise:
        return _Operand(data, scale_inv, None, None)
    columns, column_scales = (concatenated([one.transposed[i] for one in found], 1 - dim) for i in range(2))
    return _Operand(data, scale_inv, columns, column_scales)


def _quantized(x: Tensor, dtype: torch.dtype, columnwise: bool, groups: int) -> _Operand:
    rest = -(x.size(0) // groups) % _BLOCK
    data, scale_inv, columns, column_scales = ops.quantize(x, _MODE, dtype, columnwise=columnwise and rest == 0)
    if not columnwise:
        return _Operand(data, scale_inv, None, None)
    if rest != 0:
        filled = F.pad(x.unflatten(0, (groups, -1)), (0, 0, 0, rest)).flatten(0, 1)
        columns, column_scales, _, _ = ops.quantize(filled.t().contiguous(), _MODE, dtype)
    return _Operand(data, scale_inv, columns, column_scales)


def _begin_gather(plan: Plan, columns: Scaled) -> list[Tensor]:
    """All ranks' columns, behind `_gathered`. As bytes: not every backend knows the scales' type."""
    return [begin_gather(plan, t.view(torch.uint8), 1) for t in columns]


def _gathered(begun: Sequence[Tensor], columns: Scaled) -> Scaled:
    data, scale_inv = (_ops.wait_tensor(t).view(like.dtype) for t, like in zip(begun, columns, strict=True))
    return data, scale_inv


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, keep_gathered: bool, x8: Tensor, x_scale_inv: Tensor,
                x_columns: Tensor | None, x_columns_scale_inv: Tensor | None, w8: Tensor, w_scale_inv: Tensor,
                w_columns: Tensor | None, w_columns_scale_inv: Tensor | None, x: Tensor,
                *parameters: Any) -> tuple[Tensor, ...]:  # fmt: skip
        weights = list(zip(w8.split(plan.sizes), w_scale_inv.split(plan.sizes), strict=True))
        if keep_gathered:
            own = _Operand(x8, x_scale_inv, x_columns, x_columns_scale_inv).transposed
            begun = _begin_gather(plan, own)  # travels under the products
        outputs, _ = gather_products(plan, (x8, x_scale_inv), weights, parameters[len(plan.sizes) :],
                                     split_accumulator=plan.split_accumulator)  # fmt: skip
        return (*outputs, *_gathered(begun, own)) if keep_gathered else tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, keep_gathered, _, _, *columns, _, _, w_columns, w_scale_inv = inputs[:11]
        ctx.plan, ctx.state, ctx.is_gathered = plan, state, keep_gathered or plan.dim is None
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[11:]]
        if keep_gathered:
            columns = output[-2:]
            ctx.mark_non_differentiable(*columns)
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*columns, w_columns, w_scale_inv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        plan, (x_dtype, *dtypes) = ctx.plan, ctx.dtypes
        *x_columns, w_columns, w_scale_inv = ctx.saved_tensors
        x_wanted, *wanted = ctx.needs_input_grad[11:]
        count = len(plan.sizes)
        if all(grad is None for grad in output_grads[:count]):
            return (None,) * (12 + len(wanted))
        grads = materialized(output_grads[:count], plan.sizes)
        weights_wanted = any(wanted[:count])
        x_grad = None
        found: list[Tensor | None] = [None] * count
        if x_wanted or weights_wanted:
            dtype = ctx.state.dtype("backward")
            grad = _quantize(grads, dtype, 1, columnwise=weights_wanted, groups=_groups(plan))
            is_bulk = plan.algorithm == "bulk" and plan.dim is not None
            gathers = weights_wanted and not ctx.is_gathered
            if gathers:
                begun = _begin_gather(plan, x_columns)  # travels under dx
            if x_wanted and is_bulk:
                x_grad = product(grad[:2], (w_columns, w_scale_inv), plan.dtype, mode=plan.mode)
            elif x_wanted:
                x_grad = product_scatter(plan, grad[:2], (w_columns, w_scale_inv), None, split_accumulator=True)
            if gathers:
                x_columns = _gathered(begun, x_columns)
            if x_wanted and is_bulk:  # travels under dw
                x_grad = _ops.reduce_scatter_async(x_grad, 0, "sum", plan.comm, plan.size)
            if weights_wanted:
                total = product(grad.transposed, x_columns, dtypes[0], mode=plan.mode)
                found = [part if needed else None
                         for part, needed in zip(total.split(plan.sizes), wanted[:count], strict=True)]  # fmt: skip
            if x_grad is not None:
                x_grad = (_ops.wait_tensor(x_grad) if is_bulk else x_grad).to(x_dtype)
        found += [bias_grad(g, dtype) if needed else None
                  for g, needed, dtype in zip(grads, wanted[count:], dtypes[count:], strict=True)]  # fmt: skip
        return *[None] * 11, x_grad, *found


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, x8: Tensor, x_scale_inv: Tensor, x_columns: Tensor | None,
                x_columns_scale_inv: Tensor | None, w8: Tensor, w_scale_inv: Tensor, w_columns: Tensor | None,
                w_columns_scale_inv: Tensor | None, x: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:  # fmt: skip
        return product_scatter(plan, (x8, x_scale_inv), (w8, w_scale_inv), bias,
                               split_accumulator=plan.split_accumulator)  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, _, _, *x_columns, _, _, w_columns, w_scale_inv = inputs[:10]
        ctx.plan, ctx.state = plan, state
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[10:]]
        ctx.save_for_backward(*x_columns, w_columns, w_scale_inv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan, (x_dtype, weight_dtype, bias_dtype) = ctx.plan, ctx.dtypes
        *x_columns, w_columns, w_scale_inv = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[10:]
        x_grad = weight_grad = None
        if x_wanted or weight_wanted:
            grad = _quantize([dy], ctx.state.dtype("backward"), 0, columnwise=weight_wanted)
            gathers = weight_wanted and plan.dim is not None
            if gathers:
                begun = _begin_gather(plan, grad.transposed)  # travels under dx
            if x_wanted:
                (x_grad,), _ = gather_products(plan, grad[:2], [(w_columns, w_scale_inv)], [None],
                                               split_accumulator=True)  # fmt: skip
                x_grad = x_grad.to(x_dtype)
            if weight_wanted:
                columns = _gathered(begun, grad.transposed) if gathers else grad.transposed
                weight_grad = product(columns, x_columns, weight_dtype, mode=plan.mode)
        found = bias_grad(dy, bias_dtype) if bias_wanted else None
        return *[None] * 10, x_grad, weight_grad, found
