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


def _wrap(x: Tensor, dim: int) -> int:
    """Returns dimension `dim` of one element, for an x with the batch dimension last."""
    rank = x.dim() - 1
    if rank == 0:
        raise InvalidValueError("vmap: expected examples of one or more dimensions, got scalars; use x.unsqueeze(-1)")
    if not -rank <= dim < rank:
        raise IndexError(f"vmap: expected a dimension in [{-rank}, {rank - 1}], got {dim}")
    return dim % rank


def _numbered_dims_rule(op: Any, num_dims: int) -> Any:
    """Returns the rule of an operator on x whose next `num_dims` arguments are dimensions."""

    def rule(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Batched:
        x = x.movedim(in_dims[0], -1)
        dims = [_wrap(x, dim) for dim in args[:num_dims] or (0,)]
        return op(x, *dims[:num_dims], *args[num_dims:]), x.dim() - 1

    return rule


def _any_shape_rule(op: Any) -> Any:
    def rule(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Batched:
        return op(x.movedim(in_dims[0], 0), *args), 0

    return rule


def register() -> None:
    ops = torch.ops.torch_overlap
    numbered = {"all_gather": 1, "_own_part": 1, "reduce_scatter": 1, "all_to_all": 2, "all_to_all_v": 0}
    for name, num_dims in numbered.items():
        torch.library.register_vmap(f"torch_overlap::{name}", _numbered_dims_rule(getattr(ops, name), num_dims))

    @torch.library.register_vmap("torch_overlap::send")
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
