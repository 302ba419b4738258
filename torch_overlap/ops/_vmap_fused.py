"""Batching rules of the fused operators: x has the batch dimension, whose elements become more rows.

Other operands must be shared by the elements: a product per element would communicate per element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_overlap._C import InvalidValueError, UnsupportedError

Rule = tuple[Any, Any]  # results, and the positions of their batch dimensions


def _require_batch_of(op: str, names: str, in_dims: Any, batched: tuple[int, ...]) -> None:
    """Raises unless only the arguments number `batched` have the batch dimension."""
    rest = [dims for i, dims in enumerate(in_dims) if i not in batched]
    if any(dim is not None for dim in tree_leaves(rest, is_leaf=lambda dim: dim is None)):
        raise UnsupportedError(
            f"vmap: expected {names} of {op} alone to have the batch dimension, got it in another operand; "
            "call the operator for each element"
        )


def _move_batch_to_front(x: Tensor, bdim: int) -> Tensor:
    if x.dim() < 3:
        raise InvalidValueError(
            f"vmap: expected examples of two or more dimensions, got shape {list(x.select(bdim, 0).shape)}; "
            "use x.unsqueeze(0)"
        )
    return x.movedim(bdim, 0)


def _after_batch_dim(x: Tensor, dim: int) -> int:
    """Returns the position of dimension `dim` of an element, for an x with the batch dimension in front."""
    rank = x.dim() - 1
    if not -rank <= dim < rank:
        raise IndexError(f"vmap: expected a dimension in [{-rank}, {rank - 1}], got {dim}")
    return dim % rank + 1


def _register_gathers(ops: Any, rule: Any) -> None:
    @rule("all_gather_matmul")
    def _(info: Any, in_dims: Any, x: Tensor, weights: Any, biases: Any, comm: str, size: int, dim: int = 0,
          return_gathered: bool = False, algorithm: str = "auto") -> Rule:  # fmt: skip
        _require_batch_of("all_gather_matmul", "x", in_dims, (0,))
        x = _move_batch_to_front(x, in_dims[0])
        results = ops.all_gather_matmul(
            x, weights, biases, comm, size, _after_batch_dim(x, dim), return_gathered, algorithm
        )
        return results, ([0] * len(weights), 0 if return_gathered else None)

    @rule("scaled_all_gather_matmul")
    def _(info: Any, in_dims: Any, x: Tensor, scale: Tensor, weights: Any, scales: Any, biases: Any, comm: str,
          size: int, dim: int = 0, out_dtype: Any = torch.bfloat16, split: bool = False, algorithm: str = "auto",
          scaling_mode: int = 3, return_gathered: bool = False) -> Rule:  # fmt: skip
        _require_batch_of("scaled_all_gather_matmul", "x", in_dims, (0,))
        x = _move_batch_to_front(x, in_dims[0])
        results = ops.scaled_all_gather_matmul(
            x, scale, weights, scales, biases, comm, size, _after_batch_dim(x, dim), out_dtype, split, algorithm,
            scaling_mode, return_gathered,
        )  # fmt: skip
        return results, ([0] * len(weights), 0 if return_gathered else None, None)


def _register_reductions(ops: Any, rule: Any) -> None:
    @rule("matmul_reduce_scatter")
    def _(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Any, comm: str, size: int, dim: int = 0,
          *args: Any) -> Rule:  # fmt: skip
        _require_batch_of("matmul_reduce_scatter", "x", in_dims, (0,))
        x = _move_batch_to_front(x, in_dims[0])
        return ops.matmul_reduce_scatter(x, weight, bias, comm, size, _after_batch_dim(x, dim), *args), 0

    @rule("scaled_matmul_reduce_scatter")
    def _(info: Any, in_dims: Any, x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Any,
          comm: str, size: int, dim: int = 0, *args: Any) -> Rule:  # fmt: skip
        _require_batch_of("scaled_matmul_reduce_scatter", "x", in_dims, (0,))
        x = _move_batch_to_front(x, in_dims[0])
        part = ops.scaled_matmul_reduce_scatter(
            x, scale, weight, weight_scale, bias, comm, size, _after_batch_dim(x, dim), *args
        )
        return part, 0

    @rule("scaled_matmul_all_reduce")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Rule:
        _require_batch_of("scaled_matmul_all_reduce", "x", in_dims, (0,))
        return ops.scaled_matmul_all_reduce(_move_batch_to_front(x, in_dims[0]), *args), 0

    @rule("matmul_all_reduce")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Rule:
        _require_batch_of("matmul_all_reduce", "x", in_dims, (0,))
        return ops.matmul_all_reduce(_move_batch_to_front(x, in_dims[0]), *args), 0


def _register_norms(ops: Any, rule: Any) -> None:
    def in_front(t: Tensor, bdim: int | None, batch: int) -> Tensor:
        return t.expand(batch, *t.shape) if bdim is None else t.movedim(bdim, 0)

    @rule("matmul_all_reduce_rms_norm")
    def _(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Any, residual: Tensor, *args: Any) -> Rule:
        _require_batch_of("matmul_all_reduce_rms_norm", "x and residual", in_dims, (0, 3))
        x, residual = (in_front(t, in_dims[i], info.batch_size) for t, i in ((x, 0), (residual, 3)))
        return ops.matmul_all_reduce_rms_norm(x, weight, bias, residual, *args), (0, 0)

    @rule("all_reduce_rms_norm")
    def _(info: Any, in_dims: Any, x: Tensor, residual: Tensor, *args: Any) -> Rule:
        _require_batch_of("all_reduce_rms_norm", "x and residual", in_dims, (0, 1))
        x, residual = (in_front(t, in_dims[i], info.batch_size) for t, i in ((x, 0), (residual, 1)))
        return ops.all_reduce_rms_norm(x, residual, *args), (0, 0)


def _register_exchanges(ops: Any, rule: Any) -> None:
    @rule("all_to_all_matmul")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Rule:
        _require_batch_of("all_to_all_matmul", "x", in_dims, (0,))
        return ops.all_to_all_matmul(_move_batch_to_front(x, in_dims[0]).movedim(0, 1), *args), 1

    @rule("matmul_all_to_all")
    def _(info: Any, in_dims: Any, x: Tensor, weights: Any, *args: Any) -> Rule:
        _require_batch_of("matmul_all_to_all", "x", in_dims, (0,))
        results = ops.matmul_all_to_all(_move_batch_to_front(x, in_dims[0]).movedim(0, 1), weights, *args)
        return results, [1] * len(weights)

    @rule("bulk_overlap_matmul")
    def _(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Any, other: Tensor, collective: str, comm: str,
          size: int, dim: int = 0, *args: Any) -> Rule:  # fmt: skip
        _require_batch_of("bulk_overlap_matmul", "x and other", in_dims, (0, 3))
        if in_dims[0] is not None:
            x = _move_batch_to_front(x, in_dims[0])
        last = None
        if in_dims[3] is not None:
            other = other.movedim(in_dims[3], -1)
            last = other.dim() - 1
            dim = dim % last if -last <= dim < last else dim
        results = ops.bulk_overlap_matmul(x, weight, bias, other, collective, comm, size, dim, *args)
        return results, (None if in_dims[0] is None else 0, last)


def register() -> None:
    ops = torch.ops.torch_overlap

    def rule(name: str) -> Any:
        return torch.library.register_vmap(f"torch_overlap::{name}")

    _register_gathers(ops, rule)
    _register_reductions(ops, rule)
    _register_norms(ops, rule)
    _register_exchanges(ops, rule)
