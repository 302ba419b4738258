"""Sparse gradients of tables, which no collective of the backward pass sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import UnsupportedError
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.aten_call import AtenCall

__all__ = ["has_sparse_gradient", "refuse_sparse_gradient"]

# Position and name of the argument that asks for one.
_SPARSE = {
    "embedding": (4, "sparse"),
    "embedding_bag": (5, "sparse"),
    "_embedding_bag": (5, "sparse"),
    "gather": (3, "sparse_grad"),
}


def has_sparse_gradient(call: AtenCall) -> bool:
    """Returns True if the gradient of the first operand is a sparse tensor."""
    return call.name in _SPARSE and bool(call.argument(*_SPARSE[call.name], False))


def refuse_sparse_gradient(
    call: AtenCall, layout: Layout, local: Callable[[Sequence[Tensor]], Any]
) -> Callable[[Sequence[Tensor]], Any]:
    """Returns `local`, which raises UnsupportedError if the gradient of its table would be moved: `layout` is that of
    the table before it was moved."""
    name, argument = call.name.lstrip("_"), _SPARSE[call.name][1]

    def checked(tensors: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and tensors[0].requires_grad:
            raise UnsupportedError(
                f"{name}: expected a replicated table for {argument}=True, whose gradient stays where it is, got one "
                f"of layout {layout}. Call it with {argument}=False, or shard it as replicated."
            )
        return local(tensors)

    return checked
