"""Products of layers whose activations are whole on every rank: the two without sequence parallelism.

Convention: a value that is whole on every rank has a gradient that is whole on every rank, as when all ranks compute
the same loss from it. Gradients may be differentiated in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap._C import TorchComm
from torch_overlap.ops._arguments import group

__all__ = ["copy_matmul", "local_shard", "sum_matmul"]

_ops = torch.ops.torch_overlap


def copy_matmul(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], comm: TorchComm, algorithm: str
) -> list[Tensor]:
    """Computes linear(x, w, b) for each weight of this rank. The gradient of x is the sum of all ranks' products.

    That sum is a matmul_all_reduce, which overlaps communication with the product. `biases` has an entry for each
    weight.
    """
    cast = [_autocast(t) for t in (x, *weights, *biases)]
    if torch.compiler.is_exporting():
        each = _ops._invariant_to_replicated(cast[0], *group(comm)) if torch.is_grad_enabled() else cast[0]
        columns = zip(cast[1 : len(weights) + 1], cast[len(weights) + 1 :], strict=True)
        return [F.linear(each, w, b) for w, b in columns]  # type: ignore[arg-type]
    outputs: tuple[Tensor, ...] = _CopyMatmul.apply(*group(comm), algorithm, *cast)  # type: ignore[no-untyped-call]
    return list(outputs)


def sum_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: TorchComm | tuple[str, int], algorithm: str
) -> Tensor:
    """Computes matmul_all_reduce(x, weight, comm, bias). Its backward pass sends nothing: the gradient is whole.

    `comm`: the communicator, or its name and size.
    """
    cast = [_autocast(t) for t in (x, weight, bias)]
    ranks = comm if isinstance(comm, tuple) else group(comm)
    if torch.compiler.is_exporting():
        return _exported_sum(ranks, algorithm, *cast)
    output: Tensor = _SumMatmul.apply(*ranks, algorithm, *cast)  # type: ignore[no-untyped-call]
    return output


def _exported_sum(ranks: tuple[str, int], algorithm: str, x: Any, weight: Any, bias: Tensor | None) -> Tensor:
    """Returns sum_matmul by operators that have its gradient.

    An exported program has the operators of an autograd function's forward, and their gradients in place of its
    backward. That of matmul_all_reduce is the sum over the ranks.
    """
    total: Tensor
    if not torch.is_grad_enabled():
        total = _ops.matmul_all_reduce(x, weight, bias, *ranks, "sum", algorithm)
    else:
        total = _ops.all_reduce(F.linear(x, weight), "sum", *ranks, "I")
        total = total if bias is None else total + bias
    return total


def local_shard(x: Tensor, dim: int, comm: TorchComm) -> Tensor:
    """Returns this rank's part of an `x` that is whole on every rank; the parts' gradients are gathered."""
    part: Tensor = _ops._own_part(x, dim, *group(comm))
    return part


def _autocast(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    kind = t.device.type
    if torch.is_autocast_enabled(kind) and t.is_floating_point() and t.dtype != torch.float64:
        return t.to(torch.get_autocast_dtype(kind))
    return t


def _of_each_rank(whole: Tensor, comm: tuple[str, int]) -> Tensor:
    """Returns a value that is whole on every rank, for a product with this rank's part in a backward pass.

    If that product is differentiated (create_graph=True), the gradient of `whole` is the sum of those of all ranks.
    """
    if not torch.is_grad_enabled() or not whole.requires_grad or torch.compiler.is_compiling():
        return whole
    each: Tensor = _ops._invariant_to_replicated(whole, *comm)
    return each


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns F.linear(x, weight, bias), never a view: that of an autograd function cannot be changed in place."""
    if x.dim() < 3:
        return F.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.size(0)))
    if bias is None:
        torch.mm(_rows(x), weight.t(), out=_rows(out))
    else:
        torch.addmm(bias, _rows(x), weight.t(), out=_rows(out))
    return out


class _CopyMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: str, size: int, algorithm: str, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.group, ctx.algorithm = (comm, size), algorithm
        ctx.save_for_backward(x, *weights)
        return tuple(_linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = (t.conj() for t in ctx.saved_tensors)
        x = _of_each_rank(x, ctx.group)
        needs_x_grad, wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        count = len(weights)
        x_grad = None
        if needs_x_grad:
            # One product over all columns, so that 16-bit gradients are rounded once.
            grad, weight = (torch.cat(grads, -1), torch.cat(weights)) if count > 1 else (grads[0], weights[0])
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
                x_grad = sum_matmul(grad, weight.t(), None, ctx.group, ctx.algorithm)
            else:
                x_grad = _ops.matmul_all_reduce(grad, weight.t(), None, *ctx.group, "sum", ctx.algorithm)
        found = [_rows(g).t().mm(_rows(x)) if needed else None for g, needed in zip(grads, wanted[:count], strict=True)]
        found += [_rows(g).sum(0) if needed else None for g, needed in zip(grads, wanted[count:], strict=True)]
        return None, None, None, x_grad, *found


class _SumMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: str, size: int, algorithm: str, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.group = comm, size
        ctx.save_for_backward(x, weight)
        total: Tensor = _ops.matmul_all_reduce(x, weight, bias, comm, size, "sum", algorithm)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.conj() for t in ctx.saved_tensors)
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[3:]
        bias_grad = _rows(grad).sum(0) if needs_bias_grad else None
        grad = _of_each_rank(grad, ctx.group)
        x_grad = grad.matmul(weight) if needs_x_grad else None
        weight_grad = _rows(grad).t().mm(_rows(x)) if needs_weight_grad else None
        return None, None, None, x_grad, weight_grad, bias_grad
