"""Batching rules: under torch.vmap a collective moves the whole batch at once.

The batch dimension is moved to the end for operators that use dimension 0 or a numbered dimension (a negative one
counts without the batch). It may be anywhere for operators that use none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import InvalidValueError

Batched = tuple[Any, int | None]


def _at_end(x: Tensor, bdim: int) -> Tensor:
    return x.movedim(bdim, -1)


def _wrap(x: Tensor, dim: int) -> int:
    """Returns dimension `dim` of one element, for an x with the batch dimension last."""
    rank = x.dim() - 1
    if rank == 0:
        raise InvalidValueError("vmap: expected examples of one or more dimensions, got scalars; use x.unsqueeze(-1)")
    if not -rank <= dim < rank:
        raise IndexError(f"vmap: expected a dimension in [{-rank}, {rank - 1}], got {dim}")
    return dim % rank


def _any_shape_rule(op: Any) -> Any:
    def rule(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Batched:
        return op(x.movedim(in_dims[0], 0), *args), 0

    return rule


def register() -> None:
    ops = torch.ops.torch_overlap

    def rule(name: str) -> Any:
        return torch.library.register_vmap(f"torch_overlap::{name}")

    @rule("all_gather")
    def _(info: Any, in_dims: Any, x: Tensor, dim: int, *args: Any) -> Batched:
        x = _at_end(x, in_dims[0])
        return ops.all_gather(x, _wrap(x, dim), *args), x.dim() - 1

    @rule("_own_part")
    def _(info: Any, in_dims: Any, x: Tensor, dim: int, *args: Any) -> Batched:
        x = _at_end(x, in_dims[0])
        return ops._own_part(x, _wrap(x, dim), *args), x.dim() - 1

    @rule("reduce_scatter")
    def _(info: Any, in_dims: Any, x: Tensor, dim: int, *args: Any) -> Batched:
        x = _at_end(x, in_dims[0])
        return ops.reduce_scatter(x, _wrap(x, dim), *args), x.dim() - 1

    @rule("all_to_all")
    def _(info: Any, in_dims: Any, x: Tensor, split_dim: int, concat_dim: int, *args: Any) -> Batched:
        x = _at_end(x, in_dims[0])
        return ops.all_to_all(x, _wrap(x, split_dim), _wrap(x, concat_dim), *args), x.dim() - 1

    @rule("all_to_all_v")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Batched:
        x = _at_end(x, in_dims[0])
        _wrap(x, 0)
        return ops.all_to_all_v(x, *args), x.dim() - 1

    @rule("send")
    def _(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Batched:
        return ops.send(x.movedim(in_dims[0], 0), *args), None

    for name in (
        "all_reduce",
        "_all_reduce_traced",
        "broadcast",
        "_reduce_to_root",
        "permute",
        "_recv",
        "_waited",
        "_invariant_to_replicated",
        "_replicated_to_invariant",
        "_to_partial",
    ):
        torch.library.register_vmap(f"torch_overlap::{name}", _any_shape_rule(getattr(ops, name)))
