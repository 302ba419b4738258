"""Functions that are a single ATen operator on tensors and numbers, whose result is known without tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torch_overlap.mesh.aten_call import AtenCall, Operand

__all__ = ["fast_call"]

Shape = tuple[int, ...]
_ATEN = torch.ops.aten
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def fast_call(func: Callable[..., Any], args: Sequence[Any]) -> AtenCall | None:
    """Returns the call that func(*args) makes; None if only tracing can tell, including errors."""
    try:
        entry = _TABLE.get(func)
    except TypeError:  # a function without a hash
        return None
    if entry is None or not args or not isinstance(args[0], Operand):
        return None
    first = args[0]
    if first.dtype not in _FLOATS:
        return None
    for arg in args[1:]:
        is_number = entry.accepts_numbers and type(arg) in (int, float)
        if not is_number and not (isinstance(arg, Operand) and arg.dtype == first.dtype):
            return None
    shape = entry.shape_of(*(arg.shape if isinstance(arg, Operand) else () for arg in args))
    return None if shape is None else AtenCall(entry.target, args, {}, [Operand(shape, entry.dtype or first.dtype)])


def _same(*shapes: Shape) -> Shape | None:
    return shapes[0] if len(shapes) == 1 else None


def _broadcast(*shapes: Shape) -> Shape | None:
    if len(shapes) != 2:
        return None
    a, b = shapes
    if a == b or not b:
        return a
    if len(a) < len(b):
        a, b = b, a
    skip = len(a) - len(b)
    out = list(a)
    for i, n in enumerate(b):
        if n != out[skip + i]:
            if out[skip + i] != 1:
                if n != 1:
                    return None
                continue
            out[skip + i] = n
    return tuple(out)


def _matmul(*shapes: Shape) -> Shape | None:
    if len(shapes) != 2:
        return None
    a, b = shapes
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    batch = _broadcast(a[:-2], b[:-2]) if a[:-2] else b[:-2]
    return None if batch is None else (*batch, a[-2], b[-1])


def _mm(*shapes: Shape) -> Shape | None:
    return _matmul(*shapes) if len(shapes) == 2 and [len(s) for s in shapes] == [2, 2] else None


def _bmm(*shapes: Shape) -> Shape | None:
    fits = len(shapes) == 2 and [len(s) for s in shapes] == [3, 3] and shapes[0][0] == shapes[1][0]
    return _matmul(*shapes) if fits else None


def _linear(*shapes: Shape) -> Shape | None:
    if len(shapes) not in (2, 3):
        return None
    x, weight, *bias = shapes
    if not x or len(weight) != 2 or x[-1] != weight[1] or (bias and bias[0] != weight[:1]):
        return None
    return (*x[:-1], weight[0])


class _Entry(NamedTuple):
    target: Any
    shape_of: Callable[..., Shape | None]
    dtype: torch.dtype | None = None  # of the result; None means that of the operands
    accepts_numbers: bool = False  # as the second argument of this overload


def _table() -> dict[Any, _Entry]:
    table: dict[Any, _Entry] = {}

    def add(target: Any, shape_of: Callable[..., Shape | None], names: str, **properties: Any) -> None:
        for name in names.split():
            for where in (torch, torch.Tensor, F):
                function = getattr(where, name, None)
                if function is not None:
                    table[function] = _Entry(target, shape_of, **properties)

    for name in ("relu", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "abs", "erf", "log1p", "expm1",
                 "reciprocal"):  # fmt: skip
        add(getattr(_ATEN, name).default, _same, name)
    add(_ATEN.neg.default, _same, "neg __neg__")
    add(_ATEN.silu.default, _same, "silu")
    add(_ATEN.gelu.default, _same, "gelu")
    add(_ATEN.contiguous.default, _same, "contiguous")
    add(_ATEN.detach.default, _same, "detach")
    add(_ATEN.add.Tensor, _broadcast, "add __add__ __radd__", accepts_numbers=True)
    add(_ATEN.sub.Tensor, _broadcast, "sub __sub__", accepts_numbers=True)
    add(_ATEN.mul.Tensor, _broadcast, "mul __mul__ __rmul__", accepts_numbers=True)
    add(_ATEN.div.Tensor, _broadcast, "div __truediv__", accepts_numbers=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        add(getattr(_ATEN, name).Tensor, _broadcast, f"{name} __{name}__", dtype=torch.bool)
    add(_ATEN.maximum.default, _broadcast, "maximum")
    add(_ATEN.minimum.default, _broadcast, "minimum")
    add(_ATEN.matmul.default, _matmul, "matmul __matmul__")
    add(_ATEN.mm.default, _mm, "mm")
    add(_ATEN.bmm.default, _bmm, "bmm")
    add(_ATEN.linear.default, _linear, "linear")
    return table


_TABLE = _table()
