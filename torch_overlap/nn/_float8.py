"""The products of layers on 8-bit floats. Gradients of the first order only.

Products run along contiguous rows of both operands, so the transposed copies are 8-bit too:

    y  = x w^T     x [tokens, in]      w [out, in]
    dx = dy w      dy [tokens, out]    w^T [in, out]
    dw = dy^T x    dy^T [out, tokens]  x^T [in, tokens]

What travels is 8-bit where operands are gathered, and has the dtype of the result where partial products are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_overlap import ops
from torch_overlap._C import ScalingMode
from torch_overlap.nn.float8 import Float8State
from torch_overlap.ops._arguments import group

_ops = torch.ops.torch_overlap
ALIGNMENT = 16  # of what products run along
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_Scaled = tuple[Tensor, Tensor]  # a matrix in 8 bits and its scale_inv


class _Operand(NamedTuple):
    """A matrix in 8 bits, or several side by side, and its transpose; value = data * scale_inv."""

    data: Tensor
    scale_inv: Tensor
    columns: Tensor | None


class _Plan(NamedTuple):
    """What is not a tensor. `dim`: along which rows are sharded; None: all ranks have all rows."""

    comm: str
    size: int
    dim: int | None
    dtype: torch.dtype
    sizes: tuple[int, ...]  # rows of each weight
    split_accumulator: bool


def column_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], state: Float8State, dim: int | None
) -> list[Tensor]:
    """linear(all_gather(x, dim), w, b) for each of this rank's weights and biases.

    dim None: x is whole on every rank and so is its gradient, the sum of all ranks' products.
    """
    plan = _plan("ColumnParallelLinear", x, weights, state, dim)
    mine, weight = _quantize_forward(x, weights, state, x_columns=False)
    outputs: tuple[Tensor, ...] = _Column.apply(  # type: ignore[no-untyped-call]
        plan, state, *mine[:2], *weight, x, *weights, *biases
    )
    return list(outputs)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, state: Float8State, dim: int | None) -> Tensor:
    """reduce_scatter(linear(x, weight), dim) + bias. dim None: an all_reduce, and the gradient is whole."""
    plan = _plan("RowParallelLinear", x, [weight], state, dim)
    rows = x.size(dim) if dim is not None else 0
    if rows % plan.size != 0:
        raise ValueError(f"RowParallelLinear: expected dimension {dim} divisible by the group size {plan.size}, got "
                         f"{rows}; pad it")  # fmt: skip
    mine, other = _quantize_forward(x, [weight], state, x_columns=True)
    output: Tensor = _Row.apply(plan, state, *mine, *other, x, weight, bias)  # type: ignore[no-untyped-call]
    return output


def _plan(who: str, x: Tensor, weights: Sequence[Tensor], state: Float8State, dim: int | None) -> _Plan:
    kind, features = x.device.type, weights[0].size(1)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    for what, found in (("x", dtype), ("weights", weights[0].dtype)):
        if found not in _DTYPES:
            raise TypeError(f"{who}: expected {what} of float32, float16 or bfloat16 with fp8, got {found}; convert it")
    if x.dim() < 2:
        raise ValueError(f"{who}: expected x of two or more dimensions, got shape {list(x.shape)}; use x.unsqueeze(0)")
    if x.size(-1) != features:
        raise ValueError(f"{who}: expected x of {features} features, got shape {list(x.shape)}; check the layer before")
    sizes = tuple(w.size(0) for w in weights)
    name, size = group(state.comm)
    return _Plan(name, size, dim, dtype, sizes, state.recipe.use_split_accumulator)


def _quantize_forward(
    x: Tensor, weights: Sequence[Tensor], state: Float8State, *, x_columns: bool
) -> tuple[_Operand, _Operand]:
    """x and all weights as one; transposed copies of what the backward pass multiplies."""
    grad = torch.is_grad_enabled()
    x_columns = x_columns and grad and any(w.requires_grad for w in weights)
    scale = state.scales("forward", [[x], weights])
    with torch.no_grad():
        dtype = state.dtype("forward")
        mine, x_amax = _quantize([x], scale[:1], dtype, 0, x_columns)
        weight, weight_amax = _quantize(weights, scale[1:], dtype, 0, grad and x.requires_grad)
    if grad:
        state.note("forward", [x_amax, weight_amax])
    return mine, weight


def _quantize(
    parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, dim: int, columnwise: bool
) -> tuple[_Operand, Tensor]:
    """`parts`, concatenated along `dim`, 0 or -1; and their largest magnitude."""
    found = [ops.quantize_delayed(part, scale, dtype, columnwise=columnwise) for part in parts]
    data, scale_inv, columns, amax = found[0]
    if len(found) > 1:
        data = _concatenated([part[0] for part in found], dim)
        amax = torch.cat([part[3] for part in found]).amax()
        if columnwise:
            columns = _concatenated([part[2] for part in found], 1 if dim == 0 else 0)
    return _Operand(data, scale_inv, columns if columnwise else None), amax


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """As bytes: autocast knows no 8-bit floats."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


def _transposed(x: Tensor) -> Tensor:
    return x.flatten(0, -2).t().contiguous()


def _product(lhs: _Scaled, rhs: _Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
             split_accumulator: bool = True) -> Tensor:  # fmt: skip
    """lhs [..., k] rhs [n, k]^T + bias. In bfloat16, which holds every 8-bit value, where k does not suit FP8."""
    if lhs[0].size(-1) % ALIGNMENT != 0:
        assert bias is None
        with torch.autocast(lhs[0].device.type, enabled=False):
            wide = lhs[0].to(torch.bfloat16).matmul(rhs[0].to(torch.bfloat16).t())
        return (wide * (lhs[1] * rhs[1])).to(dtype)
    return ops.gemm(
        *lhs, *rhs, bias, scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING, rhs_transposed=True,
        fuse_bias=bias is not None, use_split_accumulator=split_accumulator, out_dtype=dtype,
    )[0]  # fmt: skip


def _gather_products(
    plan: _Plan,
    x: _Scaled,
    weights: Sequence[Tensor],
    weight_scale_inv: Tensor,
    biases: Sequence[Tensor | None],
    *,
    split_accumulator: bool,
) -> tuple[list[Tensor], Tensor]:
    """The products of all rows with each weight, and all rows."""
    rows = x[0] if plan.dim is None else _ops.all_gather(x[0], plan.dim, plan.comm, plan.size)
    outputs = [_product((rows, x[1]), (w, weight_scale_inv), plan.dtype, None if b is None else b.to(plan.dtype),
                        split_accumulator=split_accumulator)
               for w, b in zip(weights, biases, strict=True)]  # fmt: skip
    return outputs, rows


def _product_scatter(plan: _Plan, x: _Scaled, weight: _Scaled, bias: Tensor | None, *,
                     split_accumulator: bool) -> Tensor:  # fmt: skip
    """The sum of all ranks' products: this rank's rows of it, or all."""
    total = _product(x, weight, plan.dtype, split_accumulator=split_accumulator)
    if plan.dim is None:
        _ops.all_reduce_(total, "sum", plan.comm)
    else:
        total = _ops.reduce_scatter(total, plan.dim, "sum", plan.comm, plan.size)
    return total if bias is None else total + bias.to(plan.dtype)


def _quantize_backward(grads: Sequence[Tensor], state: Float8State, *, columnwise: bool) -> _Operand:
    grads = [g.contiguous() for g in grads]
    scale = state.scales("backward", [grads])
    operand, amax = _quantize(grads, scale, state.dtype("backward"), -1, columnwise)
    state.note("backward", [amax])
    return operand


def _bias_grad(grad: Tensor, bias_dtype: torch.dtype) -> Tensor:
    return grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(plan: _Plan, state: Float8State, x8: Tensor, x_scale_inv: Tensor, w8: Tensor, w_scale_inv: Tensor,
                w_columns: Tensor | None, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:  # fmt: skip
        biases = parameters[len(plan.sizes) :]
        outputs, _ = _gather_products(plan, (x8, x_scale_inv), w8.split(plan.sizes), w_scale_inv, biases,
                                      split_accumulator=plan.split_accumulator)  # fmt: skip
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, state, x8, x_scale_inv, _, w_scale_inv, w_columns, x, *parameters = inputs
        ctx.plan, ctx.state = plan, state
        ctx.dtypes = [x.dtype, *(None if p is None else p.dtype for p in parameters)]
        ctx.save_for_backward(x8, x_scale_inv, w_columns, w_scale_inv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, x8, (x_dtype, *dtypes) = ctx.plan, ctx.saved_tensors[0], ctx.dtypes
        _, x_scale_inv, w_columns, w_scale_inv = ctx.saved_tensors
        x_wanted, *wanted = ctx.needs_input_grad[7:]
        count = len(grads)
        weights_wanted = any(wanted[:count])
        x_grad = None
        found: list[Tensor | None] = [None] * count
        if x_wanted or weights_wanted:
            grad = _quantize_backward(grads, ctx.state, columnwise=weights_wanted)
            gathers = weights_wanted and plan.dim is not None
            if gathers:  # travels under dx
                x8 = _ops.all_gather_async(x8, plan.dim, plan.comm, plan.size)
            if x_wanted:
                x_grad = _product_scatter(plan, grad[:2], (w_columns, w_scale_inv), None,
                                          split_accumulator=True).to(x_dtype)  # fmt: skip
            if gathers:
                x8 = _ops.wait_tensor(x8)
            if weights_wanted:
                assert grad.columns is not None
                total = _product((grad.columns, grad.scale_inv), (_transposed(x8), x_scale_inv), dtypes[0])
                found = [part if needed else None
                         for part, needed in zip(total.split(plan.sizes), wanted[:count], strict=True)]  # fmt: skip
        found += [_bias_grad(g, dtype) if needed else None
                  for g, needed, dtype in zip(grads, wanted[count:], dtypes[count:], strict=True)]  # fmt: skip
        return *[None] * 7, x_grad, *found


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(plan: _Plan, state: Float8State, x8: Tensor, x_scale_inv: Tensor, x_columns: Tensor | None, w8: Tensor,
                w_scale_inv: Tensor, w_columns: Tensor | None, x: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:  # fmt: skip
        return _product_scatter(plan, (x8, x_scale_inv), (w8, w_scale_inv), bias,
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
            rows = grad.data
            if x_wanted:
                (x_grad,), rows = _gather_products(plan, grad[:2], [w_columns], w_scale_inv, [None],
                                                   split_accumulator=True)  # fmt: skip
                x_grad = x_grad.to(x_dtype)
            elif plan.dim is not None:
                rows = _ops.all_gather(rows, plan.dim, plan.comm, plan.size)
            if weight_wanted:
                columns = _transposed(rows) if grad.columns is None else grad.columns
                weight_grad = _product((columns, grad.scale_inv), (x_columns, x_scale_inv), weight_dtype)
        bias_grad = _bias_grad(dy, bias_dtype) if bias_wanted else None
        return *[None] * 8, x_grad, weight_grad, bias_grad
