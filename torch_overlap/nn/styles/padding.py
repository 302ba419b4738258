"""Padding of a sequence whose length the number of ranks does not divide.

`ShardInput` appends rows of zeros, so that each rank has as many rows. Layers that gather the sequence drop these rows
from their results, and layers that scatter it append them again. The model's code between sees the true length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap._C import StateError, TorchComm, UnsupportedError


class _Open(NamedTuple):
    """Sequences that were split and not yet gathered: the modules that split them, the length of the last, and the
    smallest length."""

    owners: tuple[object, ...]
    length: int
    min_length: int


class SharedSequence:
    """The sequence that the layers of one model share, of which each rank has its part.

    `parallelize` makes one for the styles of its plan. A style that `parallelize_module` applies has one of its own, of
    which the other layers know nothing: `is_shared` is False, and a length that must be padded is refused.
    """

    def __init__(self, comm: TorchComm, *, is_shared: bool) -> None:
        self.size, self.is_shared = comm.get_size(), is_shared
        self._open: _Open | None = None
        self._is_padded = False  # compiled code reads this before the length, so that it is the same for all lengths

    def __deepcopy__(self, _: object) -> SharedSequence:
        return self  # as the hooks of a copied model do

    def start(self, x: Tensor, dim: int, owner: object) -> Tensor:
        """Returns the padded sequence, and remembers its true length for the layers that follow."""
        length = x.size(dim)
        missing = -length % self.size
        is_compiling = torch.compiler.is_compiling()
        if missing and (is_compiling or not self.is_shared):
            advice = "Pad the input." if is_compiling else "Pad the input, or apply the plan by parallelize."
            how = "torch.compile" if is_compiling else "parallelize_module"
            raise UnsupportedError(f"ShardInput: expected a sequence divisible by {self.size} ranks under {how}, got "
                                   f"length {length}. {advice}")  # fmt: skip
        if is_compiling:
            if self._is_padded and self._open is not None and all(owner is not one for one in self._open.owners):
                raise UnsupportedError("ShardInput: expected a sequence that another ShardInput has padded to be "
                                       "gathered before one is split under torch.compile. Gather the first "
                                       f"(GatherSequence), or pad it to a multiple of {self.size}.")  # fmt: skip
            self.restore(None)
            return x
        # A module that splits again begins a new pass.
        last = self._open
        before = last if last is not None and owner not in last.owners else None
        if before is not None and before.length != length and (missing or before.length % self.size):
            raise StateError(f"ShardInput: expected the sequence of length {before.length} to be gathered before "
                             f"another is split, got one of length {length}, which the layers cannot tell apart. "
                             "Gather the first (GatherSequence), or pad both to multiples of "
                             f"{self.size}.")  # fmt: skip
        owners = (*(before.owners if before else ()), owner)
        self.restore(_Open(owners, length, min(length, before.min_length) if before else length))
        x = _Mark.apply(x, self, last)  # type: ignore[no-untyped-call]
        return _pad(x, dim, missing) if missing else x

    def end(self, whole: Tensor, dim: int) -> Tensor:
        """Returns the gathered sequence without padding, and forgets its length."""
        y = self.trim(whole, dim)
        self.restore(None)
        return y

    def restore(self, state: _Open | None) -> None:
        self._open = state
        self._is_padded = state is not None and state.length % self.size != 0

    def _expect_no_padding(self) -> None:
        """Raises UnsupportedError in compiled code if a ShardInput that is not compiled padded the sequence."""
        if self._is_padded:
            raise UnsupportedError(f"sequence parallelism: expected a sequence divisible by {self.size} ranks under "
                                   "torch.compile, got one that ShardInput has padded. Pad the input.")  # fmt: skip

    def gathered_rows(self, rows: int) -> int:
        """Returns the true length of the sequence of which each rank has `rows` rows."""
        whole = rows * self.size
        if torch.compiler.is_compiling():
            self._expect_no_padding()
            return whole
        if self._open is None:
            return whole
        if whole < self._open.min_length:
            raise StateError(f"sequence parallelism: expected all rows of the sequence of length "
                             f"{self._open.min_length} that ShardInput split, got {rows} on each of {self.size} ranks. "
                             "A slice such as x[:, -1:] is one of this rank's rows: give the module before it "
                             "GatherSequence, and the linear after it sequence_parallel=False.")  # fmt: skip
        length = self._open.length
        if length % self.size == 0:
            return whole
        if not 0 <= whole - length < self.size:
            raise StateError(f"sequence parallelism: expected rows of the sequence of length {length} that ShardInput "
                             f"split last, got {rows} on each of {self.size} ranks. Padded sequences of different "
                             "lengths cannot be interleaved: pad the input.")  # fmt: skip
        return length

    def trim(self, y: Tensor, dim: int) -> Tensor:
        """Drops the rows that were appended from a gathered sequence. Backward restores its length for layers that are
        recomputed: another sequence may have been split since."""
        length = self.gathered_rows(y.size(dim) // self.size)
        if self.is_shared and y.requires_grad and not torch.compiler.is_compiling():
            state = self._open
            y.register_hook(lambda _: self.restore(state))  # not a function: its result could not be changed in place
        return y if length == y.size(dim) else y.narrow(dim, 0, length)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """Appends the rows again before a sequence is scattered."""
        if torch.compiler.is_compiling():
            self._expect_no_padding()
            return x
        missing = -x.size(dim) % self.size
        if not missing or self._open is None or x.size(dim) != self._open.length:
            return x
        return _pad(x, dim, missing)

    def own_rows(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Returns the rows of a rank of a sequence of true length."""
        missing = -whole.size(dim) % self.size
        return (_pad(whole, dim, missing) if missing else whole).chunk(self.size, dim)[rank]


def _pad(x: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, rows))


class _Mark(torch.autograd.Function):
    """The identity, whose backward pass ends the sequence: what was split before it, in this pass or in one whose
    backward pass follows, remains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SharedSequence, last: _Open | None) -> Tensor:
        ctx.sequence, ctx.last = sequence, last
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.sequence.restore(ctx.last)
        return grad, None, None
