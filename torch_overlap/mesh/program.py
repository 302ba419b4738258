"""A torch function as operators, and the numbers of the values between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from torch_overlap.mesh.aten_call import AtenCall, Operand

__all__ = ["Program", "Recorded", "Ref"]


@dataclass(frozen=True)
class Ref:
    """A tensor in the result, by its number."""

    number: int


class Recorded(NamedTuple):
    """An operator, and the numbers of its values."""

    call: AtenCall
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Program:
    """The operators of a function.

    Attributes:
        operands: The Operands among its arguments, in order: values 0, 1, ... The same Operand object twice counts as
            two.
        constants: Plain tensors that it uses, by the numbers of their values: the same on every rank.
        steps: Its operators, in order. One without inputs (arange, zeros) gives the same on every rank.
        writes: Operands that the function changes in place: their number, and that of their new value.
        result: Its return value, with a Ref in place of each tensor; for an iterator, the tuple.
    """

    operands: list[Operand]
    constants: dict[int, Tensor] = field(default_factory=dict)
    steps: list[Recorded] = field(default_factory=list)
    writes: dict[int, int] = field(default_factory=dict)
    result: Any = None

    def results(self, values: Callable[[int], Any]) -> Any:
        """Returns the result with values(number) in place of its tensors."""
        if isinstance(self.result, Ref):
            return values(self.result.number)
        return pytree.tree_map_only(Ref, lambda ref: values(ref.number), self.result)
