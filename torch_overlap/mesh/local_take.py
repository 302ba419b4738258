"""Indexing into a table of which a rank has a part: rows of other ranks are zeros, so that the sum is right.

An index that no rank has stays out of range, so torch raises as for a whole table: on CPUs with an error, on GPUs with
a device assertion. Nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import Error

__all__ = ["IndexedDim", "local_gather", "local_take"]


class _OutOfRangeError(Error, IndexError):
    """Replaces torch's IndexError or RuntimeError, which depends on the function. An Error is a RuntimeError."""


class IndexedDim(NamedTuple):
    """A dimension that is indexed.

    Attributes:
        name: The name of the operator.
        dim: The dimension.
        size: The global size.
        own, offset: Size and offset of this rank's part.
        wraps_negative: True if negative indices count from the end.
    """

    name: str
    dim: int
    size: int
    own: int
    offset: int
    wraps_negative: bool = False

    def local_indices(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices into this rank's part, and a mask of those on other ranks, whose results are masked.
        These point to different rows: if all read one row, its gradient would be a serial sum. Invalid ones point past
        the end."""
        if self.wraps_negative:
            index = torch.where(index < 0, index + self.size, index)
        place = index - self.offset
        elsewhere = (place < 0) | (place >= self.own)
        nowhere = index != index.clamp(0, self.size - 1)
        return place.remainder(max(self.own, 1)).masked_fill(nowhere, max(self.own, 1)), elsewhere

    def local_rows(self, table: Tensor) -> Tensor:
        """Returns this rank's part. If it is empty, one row of zeros that a gradient still reaches."""
        if self.own > 0:
            return table
        shape = list(table.shape)
        shape[self.dim] = 1
        return torch.cat([table, table.new_zeros(shape)], self.dim)

    def explain(self, index: Tensor, error: Exception) -> None:
        """Raises an error that names the index as the caller wrote it. No-op if no index is out of range."""
        if index.device.type != "cpu" or is_batchedtensor(index):
            return
        lowest = -self.size if self.wraps_negative else 0
        wrong = index[(index < lowest) | (index >= self.size)]
        if wrong.numel() > 0:
            raise _OutOfRangeError(
                f"{self.name}: expected indices in [{lowest}, {self.size - 1}] of dimension {self.dim} with size "
                f"{self.size}, got {int(wrong[0])}"
            ) from error


def local_take(taken: IndexedDim, padding: int = -1) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns table[..., index, ...]. `padding`: a row without a gradient."""
    dim = taken.dim
    here = padding - taken.offset if taken.offset <= padding < taken.offset + taken.own else -1

    def take(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place, elsewhere = taken.local_indices(index)
        table = taken.local_rows(table)
        try:
            if table.dim() == 2 and dim == 0 and not table.is_complex():  # torch has no gradient of a complex embedding
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


def local_gather(taken: IndexedDim) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns table.gather(dim, index)."""

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place, elsewhere = taken.local_indices(index)
        try:
            rows = taken.local_rows(table).gather(taken.dim, place)
        except RuntimeError as error:
            taken.explain(index, error)
            raise
        return rows.masked_fill(elsewhere, 0)

    return gather
