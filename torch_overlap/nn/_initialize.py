"""Initial weights that are equal for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Fills rows of a full weight in place: [any number, in_features], from the first row to the last.
Init = Callable[[Tensor], object]

_PIECE_ELEMENTS = 1 << 22


def uniform(features: int) -> Init:
    """Returns the initialization of nn.Linear with `features` inputs."""
    bound = 1 / math.sqrt(features) if features > 0 else 0.0
    return lambda rows: nn.init.uniform_(rows, -bound, bound)


@torch.no_grad()
def fill_shard(shard: Tensor, init: Init, dim: int, rank: int, size: int) -> None:
    """Fills `shard` with part `rank` along `dim` of a full tensor that `init` draws, the same on all ranks.

    Every rank draws the full tensor in pieces of rows and keeps its part. The random number generator thus ends in the
    same state on all ranks, and no rank holds the full tensor. The pieces do not depend on the number of ranks.
    """
    if shard.is_meta:
        return
    full = [n * size if i == dim else n for i, n in enumerate(shard.shape)]
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(full[1:])))
    first = rank * shard.size(0) if dim == 0 else 0
    for begin in range(0, full[0], step):
        piece = shard.new_empty([min(step, full[0] - begin), *full[1:]])
        init(piece)
        if dim != 0:
            shard[begin : begin + len(piece)].copy_(piece.chunk(size, dim)[rank])
            continue
        low, high = max(begin, first), min(begin + len(piece), first + shard.size(0))
        if low < high:
            shard[low - first : high - first].copy_(piece[low - begin : high - begin])
