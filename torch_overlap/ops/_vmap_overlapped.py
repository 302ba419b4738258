"""Batching rules of the overlapped operators: x has the batch dimension, whose elements become more rows.

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


def _register_norm(name: str, batched: tuple[int, int]) -> None:
    """Registers the rule of an operator whose arguments number `batched` are x and the residual."""
    op = getattr(torch.ops.torch_overlap, name)

    @torch.library.register_vmap(f"torch_overlap::{name}")
    def _(info: Any, in_dims: Any, *args: Any) -> Rule:
        _require_batch_of(name, "x and residual", in_dims, batched)
        operands = list(args)
        for i in batched:
            operand, dim = args[i], in_dims[i]
            is_shared = dim is None
            operands[i] = operand.expand(info.batch_size, *operand.shape) if is_shared else operand.movedim(dim, 0)
        return op(*operands), (0, 0)


def _register_exchange(name: str) -> None:
    """Registers the rule of an operator whose x and results have the batch as dimension 1."""
    op = getattr(torch.ops.torch_overlap, name)

    @torch.library.register_vmap(f"torch_overlap::{name}")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Rule:
        _require_batch_of(name, "x", in_dims, (0,))
        results = op(_move_batch_to_front(x, in_dims[0]).movedim(0, 1), *args)
        return results, 1 if isinstance(results, Tensor) else [1] * len(results)


def _register_bulk() -> None:
    ops = torch.ops.torch_overlap

    @torch.library.register_vmap("torch_overlap::bulk_overlap_matmul")
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
    """Registers the rules."""
    _register_products()
    _register_norm("matmul_all_reduce_rms_norm", (0, 3))
    _register_norm("all_reduce_rms_norm", (0, 1))
    _register_exchange("all_to_all_matmul")
    _register_exchange("matmul_all_to_all")
    _register_bulk()
