"""Padding of a sequence whose length the number of ranks does not divide.

`ShardInput` appends rows of zeros, so that each rank has as many rows. Layers that gather the sequence drop these rows
from their results, and layers that scatter it append them again. The model's code between sees the true length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap._C import StateError, TorchComm, UnsupportedError
from torch_overlap.ops._arguments import group

# Communicator -> true length of the sequence that ShardInput split last, until GatherSequence; absent: unknown, the
# ranks divide it.
_lengths: dict[str, int] = {}


def _pad(x: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, rows))


def start_sequence(x: Tensor, dim: int, comm: TorchComm) -> Tensor:
    """Returns the padded sequence, and remembers its true length for the layers that follow."""
    name, size = group(comm)
    missing = -x.size(dim) % size
    if torch.compiler.is_compiling():
        if missing:
            raise UnsupportedError(f"ShardInput: expected a sequence divisible by {size} ranks under "
                                   f"torch.compile, got length {x.size(dim)}. Pad the input.")  # fmt: skip
        return x
    _lengths[name] = x.size(dim)
    x = _Mark.apply(x, name, None)  # type: ignore[no-untyped-call]
    return _pad(x, dim, missing) if missing else x


def end_sequence(y: Tensor, comm: TorchComm) -> Tensor:
    """Forgets the length after the sequence was gathered. Backward restores it for layers that are recomputed."""
    if torch.compiler.is_compiling():
        return y
    name, _ = group(comm)
    return _Mark.apply(y, name, _lengths.pop(name, None))  # type: ignore[no-untyped-call, no-any-return]


class _Mark(torch.autograd.Function):
    """The identity, whose backward pass sets the length of the sequence; None: there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, length: int | None) -> Tensor:
        ctx.name, ctx.length = name, length
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.length is None:
            _lengths.pop(ctx.name, None)
        else:
            _lengths[ctx.name] = ctx.length
        return grad, None, None


def gathered_rows(rows: int, comm: TorchComm) -> int:
    """Returns the true length of the sequence of which each rank has `rows` rows."""
    name, size = group(comm)
    whole = rows * size
    length: int = whole if torch.compiler.is_compiling() else _lengths.get(name, whole)
    if not 0 <= whole - length < size:
        raise StateError(f"sequence parallelism: expected rows of the sequence of length {length} that ShardInput "
                         f"split last, got {rows} on each of {size} ranks. Padded sequences of different lengths "
                         "cannot be interleaved: pad the input.")  # fmt: skip
    return length


def trim_rows(y: Tensor, dim: int, comm: TorchComm) -> Tensor:
    """Drops the rows that were appended from a gathered sequence."""
    length = gathered_rows(y.size(dim) // group(comm)[1], comm)
    return y if length == y.size(dim) else y.narrow(dim, 0, length)


def pad_rows(x: Tensor, dim: int, comm: TorchComm) -> Tensor:
    """Appends the rows again before a sequence is scattered."""
    name, size = group(comm)
    missing = -x.size(dim) % size
    if not missing or torch.compiler.is_compiling() or x.size(dim) != _lengths.get(name):
        return x
    return _pad(x, dim, missing)
