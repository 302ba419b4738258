"""Taking from a table of which a rank has a part: what is elsewhere comes as zeros, so that the sum is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["local_gather", "local_take"]


def local_take(
    own: int, offset: int, dim: int, *, wraps: int = 0, padding: int = -1
) -> Callable[[Sequence[Tensor]], Tensor]:
    """table[..., index, ...] of a dimension of which `own` rows from `offset` are here.

    `wraps`: the global size, if negative indices count from the end. `padding`: a row that gets no gradient.
    """
    here = padding - offset if offset <= padding < offset + own else -1

    def take(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place = (torch.where(index < 0, index + wraps, index) if wraps else index) - offset
        elsewhere = (place < 0) | (place >= own)
        place = place.clamp(0, max(own - 1, 0))
        if own == 0:  # one row of zeros, which a gradient reaches all the same
            shape = list(table.shape)
            shape[dim] = 1
            table = torch.cat([table, table.new_zeros(shape)], dim)
        if table.dim() == 2 and dim == 0:
            rows = torch.ops.aten.embedding.default(table, place, here)
        else:
            rows = table.index_select(dim, place.reshape(-1))
            rows = rows.reshape(*table.shape[:dim], *index.shape, *table.shape[dim + 1 :])
        mask = elsewhere.reshape(*elsewhere.shape, *(1,) * (table.dim() - 1 - dim))
        return torch.masked_fill(rows, mask, 0)

    return take


def local_gather(own: int, offset: int, dim: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """table.gather(dim, index), of which `own` from `offset` are here."""

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        table, index = tensors
        place = index - offset
        elsewhere = (place < 0) | (place >= own)
        if own == 0:
            shape = list(table.shape)
            shape[dim] = 1
            table = torch.cat([table, table.new_zeros(shape)], dim)
        return table.gather(dim, place.clamp(0, max(own - 1, 0))).masked_fill(elsewhere, 0)

    return gather
