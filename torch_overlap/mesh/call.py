"""One ATen operator on tensors of global shape, as a value.

    Operand(shape, dtype)                       a tensor, without its data
    Call(target, args, kwargs, outputs)         an operator: .name .inputs .outputs .argument() .bind() .run()
    rules.rule_of(call) -> OpRule | None        None: no rule, so whole operands (OpRule.opaque)
    capture.capture(func, args, kwargs=None, device=None, layouts=()) -> Program
        what a torch function does on Operands: Program.operands .constants .steps .writes .result .results(values);
        each of steps is Recorded(call, inputs, outputs), where values have numbers: the operands are 0, 1, ...
    local.local_call(call, rule, input_layouts, output_layouts, rank, device=None)
        -> Callable[[Sequence[Tensor]], Tensor | tuple | list], what a rank runs on its own parts

A call without a rule takes whole operands: every rank runs local_call(call, None, replicated, replicated, rank). So
does one without inputs (arange, zeros), on `device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Call", "Operand"]


# Overloads whose arguments mean something else than those of the operator they share a name with. They are operators of
# their own: no rule for the name holds for them.
_OTHER_OPERATORS = frozenset({
    "view.dtype", "view_copy.dtype", "mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype",
    "repeat_interleave.Tensor", "where.default",
})  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor of this global shape.

    `strides`: those that an operator saw when it was captured; None: those of a contiguous tensor. Two operands that
    differ in nothing else are equal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = field(default=None, compare=False)


class Call:
    """An ATen operator and its arguments.

    Attributes:
        target: The operator, as in torch.ops.aten.sum.dim_IntList.
        name: Without namespace and overload: "sum". Operators of other namespaces keep it: "mine::sum". An overload of
            another meaning is named: "view.dtype".
        args, kwargs: As the schema has them, an Operand in place of each tensor (in lists of tensors too).
        inputs: Those Operands, in order.
        outputs: The tensors of the result, in order.
        is_sequence: Is the result a tuple or list, not one tensor?
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
        self._places: list[tuple[int | str, int | None]] = []  # of each input: argument, place in its list
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
        """An argument by its place in the schema, or its name; `default` where it is not given."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def with_arguments(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Call:
        """The same operator with other arguments: the same tensors in the same order."""
        return Call(
            self.target, args, self.kwargs if kwargs is None else kwargs, self.outputs, is_sequence=self.is_sequence
        )

    def bind(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """args and kwargs with these in place of the inputs."""
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

    def run(self) -> Callable[[Sequence[Any]], Any]:
        """The operator as a function of its inputs alone."""
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
