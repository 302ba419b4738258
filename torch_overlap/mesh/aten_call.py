"""One ATen operator on tensors of global shape, as a value: AtenCall, whose tensors are Operands.

rules.rule_of gives its rule, capture.capture those of a torch function, local.local_call runs it on a rank's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["AtenCall", "Operand"]


# Overloads whose arguments have another meaning than those of the operator with the same name. They count as separate
# operators: no rule for the name applies to them.
_OTHER_OPERATORS = frozenset({
    "view.dtype", "view_copy.dtype", "mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype",
    "repeat_interleave.Tensor", "where.default",
})  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor of this global shape.

    `strides`: those at capture; None means those of a contiguous tensor. Operands are compared without their strides.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = field(default=None, compare=False)


class AtenCall:
    """An ATen operator and its arguments.

    Attributes:
        target: The operator, as in torch.ops.aten.sum.dim_IntList.
        name: The name without namespace and overload: "sum". Operators of other namespaces keep it: "mine::sum". An
            overload with another meaning keeps its overload name: "view.dtype".
        args, kwargs: Arguments as in the schema, with an Operand in place of each tensor (in lists of tensors too).
        inputs: Those Operands, in order.
        outputs: The tensors of the result, in order.
        is_sequence: True if the result is a tuple or list, not one tensor.
    """

    __slots__ = ("_places", "args", "inputs", "is_sequence", "kwargs", "name", "outputs", "target")

    def __init__(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Sequence[Operand],
        *,
        is_sequence: bool = False,
    ) -> None:
        self.target = target
        namespace, _, rest = str(target).partition(".")
        name = rest if rest in _OTHER_OPERATORS else rest.split(".")[0]
        self.name = name if namespace == "aten" else f"{namespace}::{name}"
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.outputs = list(outputs)
        self.is_sequence = is_sequence
        self.inputs: list[Operand] = []
        self._places: list[tuple[int | str, int | None]] = []  # for each input: its argument, and its index in a list
        arguments: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for key, value in arguments:
            if isinstance(value, Operand):
                self._found(value, key, None)
            elif isinstance(value, list | tuple):
                for i, item in enumerate(value):
                    if isinstance(item, Operand):
                        self._found(item, key, i)

    def _found(self, operand: Operand, key: int | str, place: int | None) -> None:
        self.inputs.append(operand)
        self._places.append((key, place))

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Returns an argument by its index in the schema, or its name; `default` if it is not given."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def with_arguments(self, args: Sequence[Any]) -> AtenCall:
        """Returns the operator with other positional arguments, which have the same tensors in the same order."""
        return AtenCall(self.target, args, self.kwargs, self.outputs, is_sequence=self.is_sequence)

    def bind(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns args and kwargs with these tensors in place of the inputs."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for tensor, (key, place) in zip(tensors, self._places, strict=True):
            store: Any = args if isinstance(key, int) else kwargs
            if place is None:
                store[key] = tensor
            else:
                if store[key] is (self.args[key] if isinstance(key, int) else self.kwargs[key]):
                    store[key] = list(store[key])
                store[key][place] = tensor
        return args, kwargs

    def as_function(self) -> Callable[[Sequence[Any]], Any]:
        """Returns the operator as a function of its inputs only."""
        target, kwargs = self.target, self.kwargs
        if all(isinstance(key, int) and place is None for key, place in self._places):
            places = [int(key) for key, _ in self._places]
            if places == list(range(len(self.args))):
                return lambda tensors: target(*tensors, **kwargs)
            rest = self.args[len(places) :]
            if places == list(range(len(places))):
                return lambda tensors: target(*tensors, *rest, **kwargs)

        def call(tensors: Sequence[Any]) -> Any:
            args, named = self.bind(tensors)
            return target(*args, **named)

        return call

    def __repr__(self) -> str:
        values = [repr(value) for value in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.target}({', '.join(values)})"
