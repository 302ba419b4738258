"""Python lists as an index, as in x[[0, 2]]. torch would copy them to a tensor, which has no data on meta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["without_lists"]


def without_lists(index: Any, shape: Sequence[int]) -> Any:
    """Returns the index of a tensor of this shape, with tensors in place of lists of numbers.

    Raises:
        IndexError: the length of a list of bools differs from its dimension; a number is out of range. Raised on every
            rank, where a part without elements would accept any number.
    """
    if not isinstance(index, tuple | list | range):
        return index
    if isinstance(index, range) or (isinstance(index, list) and all(isinstance(i, int) for i in index)):
        return _as_tensor(index, 0, shape)
    items = list(index)
    return type(index)(_as_tensor(item, _dim_of(items, i, len(shape)), shape) for i, item in enumerate(items))


def _dim_of(items: Sequence[Any], place: int, num_dims: int) -> int:
    """Returns the dimension that an item of an index applies to."""
    if any(item is Ellipsis for item in items[:place]):
        return num_dims - sum(map(_dims_taken, items[place:]))
    return sum(map(_dims_taken, items[:place]))


def _dims_taken(item: Any) -> int:
    return 0 if item is None or isinstance(item, bool) else 1


def _as_tensor(item: Any, dim: int, shape: Sequence[int]) -> Any:
    if not isinstance(item, list | tuple | range):
        return item
    made: Tensor = torch.tensor(item)
    if made.numel() == 0:
        return made.to(torch.int64)
    if made.dtype is not torch.bool or made.dim() != 1:
        if made.dtype is not torch.bool and dim < len(shape):
            _expect_inside(made, dim, shape[dim])
        return made
    if dim >= len(shape) or len(made) != shape[dim]:
        raise IndexError(
            f"getitem: expected as many bools as dimension {dim} of {tuple(shape)} has, got {len(made)} in {item}"
        )
    return made.nonzero().flatten()


def _expect_inside(index: Tensor, dim: int, size: int) -> None:
    wrong = index[(index < -size) | (index >= size)]
    if wrong.numel() > 0:
        raise IndexError(
            f"getitem: expected indices in [{-size}, {size - 1}] of dimension {dim} with size {size}, got {wrong[0]}"
        )
