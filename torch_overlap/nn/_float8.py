"""The products of layers on 8-bit floats. Gradients of the first order only. Scales of blocks: `_mxfp8`.

Products run along contiguous rows of both operands, so the transposed copies are 8-bit too:

    y  = x w^T     x [tokens, in]      w [out, in]
    dx = dy w      dy [tokens, out]    w^T [in, out]
    dw = dy^T x    dy^T [out, tokens]  x^T [in, tokens]

What travels is 8-bit where operands are gathered, and has the dtype of the result where partial products are summed.
With sequence parallelism y and dx are the scaled operators, which overlap; without it the sum follows its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_overlap._C import ScalingMode
from torch_overlap.nn import _mxfp8
from torch_overlap.nn._float8_products import (
    Operand,
    Plan,
    Scaled,
    begin_gather,
    bias_grad,
    gather_products,
    materialized,
    product,
    product_scatter,
    quantize,
    transposed,
)
from torch_overlap.nn.float8 import Float8State
from torch_overlap.ops._arguments import group

_ops = torch.ops.torch_overlap
_ALGORITHMS = ("auto", "sequential", "chunked", "ring", "bulk")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    state: Float8State,
    dim: int | None,
    algorithm: str,
    keep_gathered: bool,
) -> list[Tensor]:
    """linear(all_gather(x, dim), w, b) for each of this rank's weights and biases.

    dim None: x is whole on every rank and so is its gradient, the sum of all ranks' products. keep_gathered: the 8-bit
    rows of all ranks are kept for the gradients of the weights.
    """
    plan = _plan("ColumnParallelLinear", x, weights, state, dim, algorithm)
    if plan.mode == ScalingMode.MXFP8_1D_SCALING:
        return _mxfp8.column_products(plan, state, keep_gathered, x, weights, biases)
    mine, weight = _quantize_forward(x, weights, state, x_columns=False)
    outputs: tuple[Tensor, ...] = _Column.apply(  # type: ignore[no-untyped-call]
        plan, state, keep_gathered, *mine[:2], *weight, x, *weights, *biases
    )
    return list(outputs[: len(weights)])


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Float8State, dim: int | None, algorithm: str
) -> Tensor:
    """reduce_scatter(linear(x, weight), dim) + bias. dim None: an all_reduce, and the gradient is whole."""
    plan = _plan("RowParallelLinear", x, [weight], state, dim, algorithm)
    rows = x.size(dim) if dim is not None else 0
    if rows % plan.size != 0:
        raise ValueError(f"RowParallelLinear: expected dimension {dim} divisible by the group size {plan.size}, got "
                         f"{rows}; pad it")  # fmt: skip
    if plan.mode == ScalingMode.MXFP8_1D_SCALING:
        return _mxfp8.row_product(plan, state, x, weight, bias)
    mine, other = _quantize_forward(x, [weight], state, x_columns=True)
    output: Tensor = _Row.apply(plan, state, *mine, *other, x, weight, bias)  # type: ignore[no-untyped-call]
    return output


def _plan(who: str, x: Tensor, weights: Sequence[Tensor], state: Float8State, dim: int | None, algorithm: str) -> Plan:
    kind, features = x.device.type, weights[0].size(1)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    for what, found in (("x", dtype), ("weights", weights[0].dtype)):
        if found not in _DTYPES:
            raise TypeError(f"{who}: expected {what} of float32, float16 or bfloat16 with fp8, got {found}; convert it")
    if x.dim() < 2:
        raise ValueError(f"{who}: expected x of two or more dimensions, got shape {list(x.shape)}; use x.unsqueeze(0)")
    if x.size(-1) != features:
        raise ValueError(f"{who}: expected x of {features} features, got shape {list(x.shape)}; check the layer before")
    if dim is not None and not (-x.dim() <= dim < x.dim() - 1 and dim != -1):
        what = "gather_dim" if who == "ColumnParallelLinear" else "scatter_dim"
        raise ValueError(f"{who}: expected {what} to be a dimension of rows, got {dim}, for shape {list(x.shape)}")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{who}: expected algorithm to be one of {', '.join(_ALGORITHMS)}, got '{algorithm}'")
    sizes = tuple(w.size(0) for w in weights)
    name, size = group(state.comm)
    is_mx = state.recipe.scaling == "mxfp8"
    mode = ScalingMode.MXFP8_1D_SCALING if is_mx else ScalingMode.CURRENT_TENSOR_SCALING
    return Plan(name, size, dim, dtype, algorithm, sizes, state.recipe.use_split_accumulator, mode)


def _quantize_forward(
    x: Tensor, weights: Sequence[Tensor], state: Float8State, *, x_columns: bool
) -> tuple[Operand, Operand]:
    """x and all weights as one; transposed copies of what the backward pass multiplies."""
    grad = torch.is_grad_enabled()
    x_columns = x_columns and grad and any(w.requires_grad for w in weights)
    scale = state.scales("forward", [[x], weights])
    with torch.no_grad():
        dtype = state.dtype("forward")
        mine, x_amax = quantize([x], scale[:1], dtype, 0, x_columns)
        weight, weight_amax = quantize(weights, scale[1:], dtype, 0, grad and x.requires_grad)
    if grad:
        state.note("forward", [x_amax, weight_amax])
    return mine, weight


def _quantize_backward(grads: Sequence[Tensor], state: Float8State, *, columnwise: bool) -> Operand:
    grads = [g.contiguous() for g in grads]
    scale = state.scales("backward", [grads])
    operand, amax = quantize(grads, scale, state.dtype("backward"), -1, columnwise)
    state.note("backward", [amax])
    return operand


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, keep_gathered: bool, x8: Tensor, x_scale_inv: Tensor, w8: Tensor,
                w_scale_inv: Tensor, w_columns: Tensor | None, x: Tensor,
                *parameters: Any) -> tuple[Tensor, ...]:  # fmt: skip
        biases = parameters[len(plan.sizes) :]
        weights = [(w, w_scale_inv) for w in w8.split(plan.sizes)]
        outputs, gathered = gather_products(plan, (x8, x_scale_inv), weights, biases,
                                            split_accumulator=plan.split_accumulator,
                                            return_gathered=keep_gathered)  # fmt: skip
        return (*outputs, gathered) if keep_gathered else tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, keep_gathered, x8, x_scale_inv, _, w_scale_inv, w_columns, x, *parameters = inputs
        ctx.plan, ctx.state, ctx.is_gathered = plan, state, keep_gathered or plan.dim is None
        ctx.dtypes = [x.dtype, *(None if p is None else p.dtype for p in parameters)]
        if keep_gathered:
            x8 = output[-1]
            ctx.mark_non_differentiable(x8)
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(x8, x_scale_inv, w_columns, w_scale_inv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        plan, x8, (x_dtype, *dtypes) = ctx.plan, ctx.saved_tensors[0], ctx.dtypes
        _, x_scale_inv, w_columns, w_scale_inv = ctx.saved_tensors
        x_wanted, *wanted = ctx.needs_input_grad[8:]
        count = len(plan.sizes)
        if all(grad is None for grad in output_grads[:count]):
            return (None,) * (9 + len(wanted))
        grads = materialized(output_grads[:count], plan.sizes)
        weights_wanted = any(wanted[:count])
        x_grad = None
        found: list[Tensor | None] = [None] * count
        if x_wanted or weights_wanted:
            grad = _quantize_backward(grads, ctx.state, columnwise=weights_wanted)
            is_bulk = plan.algorithm == "bulk" and plan.dim is not None
            gathers = weights_wanted and not ctx.is_gathered
            if gathers:
                x8 = begin_gather(plan, x8, plan.dim)  # travels under dx
            if x_wanted and is_bulk:
                x_grad = product(grad[:2], (w_columns, w_scale_inv), plan.dtype)
            elif x_wanted:
                x_grad = product_scatter(plan, grad[:2], (w_columns, w_scale_inv), None, split_accumulator=True)
            if gathers:
                x8 = _ops.wait_tensor(x8)
            if x_wanted and is_bulk:  # travels under dw
                x_grad = _ops.reduce_scatter_async(x_grad, plan.dim, "sum", plan.comm, plan.size)
            if weights_wanted:
                assert grad.columns is not None
                total = product((grad.columns, grad.scale_inv), (transposed(x8), x_scale_inv), dtypes[0])
                found = [part if needed else None
                         for part, needed in zip(total.split(plan.sizes), wanted[:count], strict=True)]  # fmt: skip
            if x_grad is not None:
                x_grad = (_ops.wait_tensor(x_grad) if is_bulk else x_grad).to(x_dtype)
        found += [bias_grad(g, dtype) if needed else None
                  for g, needed, dtype in zip(grads, wanted[count:], dtypes[count:], strict=True)]  # fmt: skip
        return *[None] * 8, x_grad, *found


def _row_gradient(
    plan: Plan, grad: Operand, weight: Scaled, x_wanted: bool, weight_wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradient of x, and the outputs' of all rows if the weight's is wanted.

    Rows that both need travel once and before, or twice: for dx while it is multiplied, and under it for dw.
    """
    overlaps = plan.dim is not None and x_wanted and not (weight_wanted and plan.algorithm not in ("auto", "ring"))
    rows = grad.data
    if plan.dim is not None and (weight_wanted or not overlaps):
        rows = begin_gather(plan, rows, plan.dim)
    if not overlaps:
        rows = rows if plan.dim is None else _ops.wait_tensor(rows)
        return product((rows, grad.scale_inv), weight, plan.dtype) if x_wanted else None, rows
    (x_grad,), _ = gather_products(plan, grad[:2], [weight], [None], split_accumulator=True)
    return x_grad, _ops.wait_tensor(rows) if weight_wanted else rows


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, x8: Tensor, x_scale_inv: Tensor, x_columns: Tensor | None, w8: Tensor,
                w_scale_inv: Tensor, w_columns: Tensor | None, x: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:  # fmt: skip
        return product_scatter(plan, (x8, x_scale_inv), (w8, w_scale_inv), bias,
                                split_accumulator=plan.split_accumulator)  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, _, x_scale_inv, x_columns, _, w_scale_inv, w_columns, *tensors = inputs
        ctx.plan, ctx.state = plan, state
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(x_columns, x_scale_inv, w_columns, w_scale_inv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan, (x_dtype, weight_dtype, bias_dtype) = ctx.plan, ctx.dtypes
        x_columns, x_scale_inv, w_columns, w_scale_inv = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[8:]
        x_grad = weight_grad = None
        if x_wanted or weight_wanted:
            grad = _quantize_backward([dy], ctx.state, columnwise=weight_wanted and plan.dim is None)
            x_grad, rows = _row_gradient(plan, grad, (w_columns, w_scale_inv), x_wanted, weight_wanted)
            x_grad = None if x_grad is None else x_grad.to(x_dtype)
            if weight_wanted:
                columns = transposed(rows) if grad.columns is None else grad.columns
                weight_grad = product((columns, grad.scale_inv), (x_columns, x_scale_inv), weight_dtype)
        found = bias_grad(dy, bias_dtype) if bias_wanted else None
        return *[None] * 8, x_grad, weight_grad, found
