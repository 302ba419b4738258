"""Batching rules of the fused operators: x has the batch dimension, whose elements become more rows.

Other operands must be shared by the elements: a product per element would communicate per element.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _register_rows(name: str, out_dims: Callable[[dict[str, Any]], Any]) -> None:
    """Registers the rule of an operator on rows of x. `out_dims`: batch dimensions of the results, by its arguments."""
    op = getattr(torch.ops.torch_overlap, name).default
    parameters = op._schema.arguments

    @torch.library.register_vmap(f"torch_overlap::{name}")
    def _(info: Any, in_dims: Any, *args: Any) -> Rule:
        _require_batch_of(name, "x", in_dims, (0,))
        given = {parameter.name: arg for parameter, arg in zip(parameters, args, strict=False)}
        given |= {p.name: p.default_value for p in parameters[len(args) :]}
        given["x"] = _move_batch_to_front(given["x"], in_dims[0])
        for dim in ("gather_dim", "scatter_dim"):
            if dim in given:
                given[dim] = _after_batch_dim(given["x"], given[dim])
        return op(**given), out_dims(given)


def _gathered(given: dict[str, Any]) -> tuple[Any, ...]:
    return [0] * len(given["weights"]), 0 if given["return_gathered"] else None


def _register_products() -> None:
    _register_rows("all_gather_matmul", _gathered)
    _register_rows("scaled_all_gather_matmul", lambda given: (*_gathered(given), None))
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        _register_rows(name, lambda given: 0)
        _register_rows(f"scaled_{name}", lambda given: 0)


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

    _register_products()
    _register_norms(ops, rule)
    _register_exchanges(ops, rule)
