"""The products of layers on 8-bit floats. Gradients of the first order only.

Gathered operands are sent in 8 bits, partial products in the dtype of the result. y and dx come from the scaled
operators, which overlap.

With block scales x and y are matrices here, whose rows are in rank order along dimension 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_overlap._C import UnsupportedError
from torch_overlap.nn import _algorithm_checks
from torch_overlap.nn._float8_gemms import (
    Plan,
    Scaled,
    all_gather_gemms,
    bias_grad,
    gemm_reduce_scatter,
    materialized,
    product,
    start_all_gather,
)
from torch_overlap.nn._float8_operands import (
    Operand,
    columns_of,
    quantize_backward,
    quantize_forward,
    start_gather_for_backward,
    wait_gather_for_backward,
    weights_of,
)
from torch_overlap.nn.float8 import Float8State
from torch_overlap.ops._arguments import group

_ops = torch.ops.torch_overlap
ALGORITHMS = ("auto", "sequential", "pipelined", "p2p", "bulk")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """once_differentiable, which alone takes gradients of gradients as zero where the loss is linear."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError("backward: expected create_graph=False through a layer with fp8, whose gradients "
                                   "are of the first order, got True. Use fp8=None.")  # fmt: skip
        return once(ctx, *grads)

    return checked


def column_parallel_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    state: Float8State,
    dim: int | None,
    algorithm: str,
    keep_gathered: bool,
) -> list[Tensor]:
    """Computes linear(all_gather(x, dim), w, b) for each of this rank's weights and biases.

    dim None: x is whole on every rank and so is its gradient, the sum of all ranks' products. keep_gathered: keeps, in
    8 bits, the data of all ranks' rows that the gradients of the weights need.
    """
    plan = _plan("ColumnParallelLinear", x, weights, state, dim, algorithm)
    rows = _to_rows(x, dim) if plan.block else x
    trains = plan.is_training and any(w.requires_grad for w in weights)
    mine, weight = quantize_forward(plan, state, rows, weights, x_columns=trains and plan.block > 0,
                                    w_columns=plan.is_training and x.requires_grad, ranks=1)  # fmt: skip
    needs_grad = plan.is_training and any(t is not None and t.requires_grad for t in (rows, *weights, *biases))
    # Without gradients torch.compile cannot trace an autograd function of any number of tensors.
    run: Callable[..., tuple[Tensor, ...]] = _Column.apply if needs_grad else _Column.forward
    found = run(_as_row_plan(plan), state, keep_gathered, *mine, *weight, rows, *weights, *biases)
    outputs = list(found[: len(weights)])
    return [_from_rows(y, x, dim, plan.size, 1) for y in outputs] if plan.block else outputs


def row_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Float8State, dim: int | None, algorithm: str
) -> Tensor:
    """Computes reduce_scatter(linear(x, weight), dim) + bias. dim None: an all_reduce, and the gradient is whole."""
    plan = _plan("RowParallelLinear", x, [weight], state, dim, algorithm)
    rows = _to_rows(x, dim) if plan.block else x
    mine, other = quantize_forward(plan, state, rows, [weight], x_columns=plan.is_training and weight.requires_grad,
                                   w_columns=plan.is_training and x.requires_grad, ranks=_ranks(plan))  # fmt: skip
    output: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
        _as_row_plan(plan), state, *mine, *other, rows, weight, bias
    )
    return _from_rows(output, x, dim, 1, plan.size) if plan.block else output


def _plan(who: str, x: Tensor, weights: Sequence[Tensor], state: Float8State, dim: int | None, algorithm: str) -> Plan:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    for what, found in (("x", dtype), ("weights", weights[0].dtype)):
        if found not in _DTYPES:
            raise TypeError(f"{who}: expected {what} of float32, float16 or bfloat16 with fp8, got {found}; convert it")
    if dim is not None and not (-x.dim() <= dim < x.dim() - 1 and dim != -1):
        what = "gather_dim" if who == "ColumnParallelLinear" else "scatter_dim"
        raise ValueError(f"{who}: expected {what} to be a dimension of rows, got {dim}, for shape "
                         f"{list(x.shape)}. The features are last.")  # fmt: skip
    _algorithm_checks.expect_algorithm(who, algorithm, ALGORITHMS)
    sizes = tuple(w.size(0) for w in weights)
    recipe, (name, size) = state.recipe, group(state.comm)
    scatters = who == "RowParallelLinear" and dim is not None
    if scatters and x.size(dim) % size != 0:
        raise ValueError(f"{who}: expected dimension {dim} divisible by the group size {size}, got {x.size(dim)}; "
                         "pad it")  # fmt: skip
    rows = x.shape[:-1].numel() // (size if scatters else 1)
    if rows % recipe.alignment_of_rows != 0:
        raise ValueError(f"{who}: expected rows of a rank divisible by {recipe.alignment_of_rows} with "
                         f"{recipe.scaling}, got {rows}, for shape {list(x.shape)}; pad it")  # fmt: skip
    return Plan(name, size, dim, dtype, algorithm, sizes, recipe.use_split_accumulator, recipe.mode, recipe.block,
                torch.is_grad_enabled())  # fmt: skip


def _as_row_plan(plan: Plan) -> Plan:
    return plan._replace(dim=0) if plan.block and plan.dim is not None else plan


def _ranks(plan: Plan) -> int:
    """Returns the number of ranks whose rows a whole matrix has."""
    return 1 if plan.dim is None else plan.size


def _to_rows(x: Tensor, dim: int | None) -> Tensor:
    """Returns [rows, features], with `dim` outermost."""
    return (x if dim is None else x.movedim(dim, 0)).flatten(0, -2).contiguous()


def _from_rows(rows: Tensor, x: Tensor, dim: int | None, times: int, parts: int) -> Tensor:
    """Returns rows in the shape of x except for the features, and for `dim`, whose size is multiplied by `times` /
    `parts`."""
    if dim is None:
        return rows.view(*x.shape[:-1], rows.size(-1))
    first, *others = x.movedim(dim, 0).shape[:-1]
    return rows.view(first * times // parts, *others, rows.size(-1)).movedim(0, dim).contiguous()


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, keep_gathered: bool, x8: Tensor, x_scale_inv: Tensor,
                x_columns: Tensor | None, x_columns_scale_inv: Tensor | None, w8: Tensor, w_scale_inv: Tensor,
                w_columns: Tensor | None, w_columns_scale_inv: Tensor | None, x: Tensor,
                *parameters: Any) -> tuple[Tensor, ...]:  # fmt: skip
        mine = Operand(x8, x_scale_inv, x_columns, x_columns_scale_inv)
        pending_gathers = (
            start_gather_for_backward(plan, mine.transposed) if keep_gathered and plan.block else []
        )  # overlaps with the products
        outputs, gathered = all_gather_gemms(plan, mine.rows, weights_of(plan, w8, w_scale_inv),
                                            parameters[len(plan.sizes) :], split_accumulator=plan.split_accumulator,
                                            return_gathered=keep_gathered and not plan.block)  # fmt: skip
        if not keep_gathered:
            return tuple(outputs)
        return (
            *outputs,
            *(wait_gather_for_backward(plan, pending_gathers, mine.transposed) if plan.block else (gathered,)),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, keep_gathered = inputs[:3]
        mine, weight = Operand(*inputs[3:7]), Operand(*inputs[7:11])
        ctx.plan, ctx.state, ctx.is_gathered = plan, state, keep_gathered or plan.dim is None
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[11:]]
        kept: tuple[Any, ...] = (mine.columns, mine.columns_scale_inv) if plan.block else mine.rows
        if keep_gathered:
            gathered = output[len(plan.sizes) :]
            ctx.mark_non_differentiable(*gathered)
            ctx.set_materialize_grads(False)
            kept = gathered if plan.block else (*gathered, kept[1])
        ctx.save_for_backward(*kept, weight.columns, weight.scale_inv_of_columns)

    @staticmethod
    @_first_order
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        plan, (x_dtype, *dtypes) = ctx.plan, ctx.dtypes
        *kept, w_columns, w_scale_inv = ctx.saved_tensors
        needs_x_grad, *wanted = ctx.needs_input_grad[11:]
        count = len(plan.sizes)
        if all(grad is None for grad in output_grads[:count]):
            return (None,) * (12 + len(wanted))
        grads = materialized(output_grads[:count], plan.sizes)
        needs_weight_grads = any(wanted[:count])
        x_grad = None
        found: list[Tensor | None] = [None] * count
        if needs_x_grad or needs_weight_grads:
            grad = quantize_backward(plan, ctx.state, grads, columnwise=needs_weight_grads, ranks=_ranks(plan))
            is_bulk = plan.algorithm == "bulk" and plan.dim is not None
            gathers = needs_weight_grads and not ctx.is_gathered
            if gathers:
                pending_gathers = start_gather_for_backward(plan, kept)  # overlaps with dx
            if needs_x_grad and is_bulk:
                x_grad = product(grad.rows, (w_columns, w_scale_inv), plan.dtype, plan.mode)
            elif needs_x_grad:
                x_grad = gemm_reduce_scatter(plan, grad.rows, (w_columns, w_scale_inv), None, split_accumulator=True)
            if gathers:
                kept = wait_gather_for_backward(plan, pending_gathers, kept)
            if needs_x_grad and is_bulk:  # overlaps with dw
                x_grad = _ops.reduce_scatter_async(x_grad, plan.dim, "sum", plan.comm, plan.size)
            if needs_weight_grads:
                total = product(grad.transposed, columns_of(plan, kept), dtypes[0], plan.rowwise_mode)
                found = [part if needed else None
                         for part, needed in zip(total.split(plan.sizes), wanted[:count], strict=True)]  # fmt: skip
            if x_grad is not None:
                x_grad = (_ops.wait_tensor(x_grad) if is_bulk else x_grad).to(x_dtype)
        found += [bias_grad(g, dtype) if needed else None
                  for g, needed, dtype in zip(grads, wanted[count:], dtypes[count:], strict=True)]  # fmt: skip
        return *[None] * 11, x_grad, *found


def _row_gradient(
    plan: Plan, grad: Operand, weight: Scaled, needs_x_grad: bool, needs_weight_grad: bool
) -> tuple[Tensor | None, Scaled | None]:
    """Returns the gradient of x, and the columns of all outputs' gradients if the weight's gradient is needed.

    The data for the weight's gradient is sent while dx is computed. If dx and dw need the same rows, these are sent
    once and before both, unless dx is multiplied while its rows are sent ("p2p", "auto").
    """
    gathers = needs_weight_grad and plan.dim is not None
    if gathers and needs_x_grad and not plan.block and plan.algorithm not in ("auto", "p2p"):
        rows = _ops.wait_tensor(start_all_gather(plan, grad.data, plan.dim)), grad.scale_inv
        return product(rows, weight, plan.dtype, plan.mode), columns_of(plan, rows)
    pending_gathers = start_gather_for_backward(plan, grad.kept(plan)) if gathers else []
    x_grad = None
    if needs_x_grad:
        (x_grad,), _ = all_gather_gemms(plan, grad.rows, [weight], [None], split_accumulator=True)
    if not needs_weight_grad:
        return x_grad, None
    return x_grad, columns_of(
        plan, wait_gather_for_backward(plan, pending_gathers, grad.kept(plan))
    ) if gathers else grad.transposed


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, state: Float8State, x8: Tensor, x_scale_inv: Tensor, x_columns: Tensor | None,
                x_columns_scale_inv: Tensor | None, w8: Tensor, w_scale_inv: Tensor, w_columns: Tensor | None,
                w_columns_scale_inv: Tensor | None, x: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:  # fmt: skip
        return gemm_reduce_scatter(plan, (x8, x_scale_inv), (w8, w_scale_inv), bias,
                               split_accumulator=plan.split_accumulator)  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        mine, weight = Operand(*inputs[2:6]), Operand(*inputs[6:10])
        ctx.plan, ctx.state = inputs[:2]
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[10:]]
        ctx.save_for_backward(mine.columns, mine.scale_inv_of_columns, weight.columns, weight.scale_inv_of_columns)

    @staticmethod
    @_first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan, (x_dtype, weight_dtype, bias_dtype) = ctx.plan, ctx.dtypes
        *x_columns, w_columns, w_scale_inv = ctx.saved_tensors
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[10:]
        x_grad = weight_grad = None
        if needs_x_grad or needs_weight_grad:
            columnwise = needs_weight_grad and (plan.block > 0 or plan.dim is None)
            grad = quantize_backward(plan, ctx.state, [dy], columnwise=columnwise, ranks=1)
            x_grad, columns = _row_gradient(plan, grad, (w_columns, w_scale_inv), needs_x_grad, needs_weight_grad)
            x_grad = None if x_grad is None else x_grad.to(x_dtype)
            if columns is not None:
                weight_grad = product(columns, x_columns, weight_dtype, plan.rowwise_mode)
        found = bias_grad(dy, bias_dtype) if needs_bias_grad else None
        return *[None] * 10, x_grad, weight_grad, found
