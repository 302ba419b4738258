"""Taking from a table of which a rank has a part: what is elsewhere comes as zeros, so that the sum is right.

An index that no rank has stays one, so torch refuses it here as it does for a whole table: on CPUs with an error, on
GPUs with a device assertion. Nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import Error

__all__ = ["Taken", "local_gather", "local_take"]


class _OutOfRangeError(Error, IndexError):
    """Torch raises this or a RuntimeError, as functions and dimensions go: an Error is one."""


class Taken(NamedTuple):
    """A dimension that is taken from.

    Attributes:
        name: Of the operator.
        dim: Which one.
        size: The global one.
        own, offset: How much of it is here, from where.
        wraps: Do negative indices count from the end?
    """

    name: str
    dim: int
    size: int
    own: int
    offset: int
    wraps: bool = False

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where to look here, and what is elsewhere. What is nowhere is past the end."""
        if self.wraps:
            index = torch.where(index < 0, index + self.size, index)
        place = index - self.offset
        elsewhere = (place < 0) | (place >= self.own)
        nowhere = index != index.clamp(0, self.size - 1)
        return place.clamp(0, max(self.own - 1, 0)).masked_fill(nowhere, max(self.own, 1)), elsewhere

    def rows_of(self, table: Tensor) -> Tensor:
        """The own part; where that is nothing one row of zeros, which a gradient reaches all the same."""
        if self.own > 0:
            return table
        shape = list(table.shape)
        shape[self.dim] = 1
        return torch.cat([table, table.new_zeros(shape)], self.dim)

    def explain(self, index: Tensor, error: Exception) -> None:
        """Raises an error that names the index as the caller wrote it; nothing where no index is out of range."""
        if index.device.type != "cpu" or is_batchedtensor(index):
            return
        lowest = -self.size if self.wraps else 0
        wrong = index[(index < lowest) | (index >= self.size)]
        if wrong.numel() > 0:
            raise _OutOfRangeError(
                f"{self.name}: expected indices in [{lowest}, {self.size - 1}] of dimension {self.dim} with size "
                f"{self.size}, got {int(wrong[0])}"
            ) from error


def local_take(taken: Taken, padding: int = -1) -> Callable[[Sequence[Tensor]], Tensor]:
    """table[..., index, ...]. `padding`: a row that gets no gradient."""
    dim = taken.dim
    here = padding - taken.offset if taken.offset <= padding < taken.offset + taken.own else -1

    def take(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place, elsewhere = taken.places(index)
        table = taken.rows_of(table)
        try:
            if table.dim() == 2 and dim == 0:
                rows = torch.ops.aten.embedding.default(table, place, here)
            else:
                rows = table.index_select(dim, place.reshape(-1))
                rows = rows.reshape(*table.shape[:dim], *index.shape, *table.shape[dim + 1 :])
        except (IndexError, RuntimeError) as error:
            taken.explain(index, error)
            raise
        mask = elsewhere.reshape(*elsewhere.shape, *(1,) * (table.dim() - 1 - dim))
        return torch.masked_fill(rows, mask, 0)

    return take


def local_gather(taken: Taken) -> Callable[[Sequence[Tensor]], Tensor]:
    """table.gather(dim, index)."""

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place, elsewhere = taken.places(index)
        try:
            rows = taken.rows_of(table).gather(taken.dim, place)
        except RuntimeError as error:
            taken.explain(index, error)
            raise
        return rows.masked_fill(elsewhere, 0)

    return gather
