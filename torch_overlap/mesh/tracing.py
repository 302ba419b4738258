"""Sharded values under torch.compile.

Dynamo follows the code of Sharded. What depends on layouts, shapes and arguments alone it asks once (`asked`) and keeps
as a constant: the Spec of a value, the target of a move, the recipe of a function. What a rank runs on its local
tensors is one call in Dynamo's graph (`run_kept`); compilers see its operators, and collectives, one level below.

A compiled function is guarded by the Specs of its arguments: another layout, shape, dtype or mesh compiles again.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_overlap._C import MeshComms
from torch_overlap.mesh._core import Layout

torch.utils._pytree.register_constant(Layout)

__all__ = [
    "Named",
    "as_constant",
    "asked",
    "is_argument",
    "is_dynamo_compiling",
    "layout_in_trace",
    "name_it",
    "run_local",
]

_MARK = "torch_overlap_mesh_"
_counter = itertools.count()
_named: WeakValueDictionary[str, Any] = WeakValueDictionary()


def name_it(value: Any) -> str:
    """A name for an object, by which functions that are asked get it: Dynamo guards strings, and hands them on."""
    name = f"{_MARK}{next(_counter)}"
    _named[name] = value
    return name


class Named:
    """An object that functions may be asked about."""

    __slots__ = ("__weakref__", "traced_name")

    def __init__(self) -> None:
        self.traced_name = name_it(self)


# --- Constants of a trace -----------------------------------------------------------------------


def asked(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; under torch.compile it is run while that traces, and a constant of what it compiles.

    Arguments are constants: plain values, torch's own, Named ones and meshes, in lists, tuples and dicts.
    """
    return _asked(function, as_constant(args)) if is_dynamo_compiling() else function(*args)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asked(function: Callable[..., Any], args: Any) -> Any:
    return function(*_with_named(args))


def as_constant(value: Any) -> Any:
    """An argument in a form that Dynamo takes for a constant."""
    if isinstance(value, Named):
        return value.traced_name
    if isinstance(value, MeshComms):
        return value.traced_name
    if isinstance(value, int) and not isinstance(value, bool):
        return int(f"{value}")  # where Dynamo took it for a symbol, this fixes it: it guards the value
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, list):
        return [as_constant(item) for item in value]
    if isinstance(value, tuple):  # torch.Size and P, too
        return tuple([as_constant(item) for item in value])
    if isinstance(value, dict):
        return {name: as_constant(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(as_constant(value.start), as_constant(value.stop), as_constant(value.step))
    return value


def _with_named(value: Any) -> Any:
    kind = type(value)
    if kind is str and value.startswith(_MARK):
        return _named[value]
    if kind is list or kind is tuple:
        return kind(map(_with_named, value))
    if kind is dict:
        return {name: _with_named(item) for name, item in value.items()}
    return value


class _Held:
    """Constants that a trace reads as attributes: those that it may hand on."""


_held = _Held()


def _hold(spec: Any) -> str:
    setattr(_held, spec.traced_name, spec.layout)
    name: str = spec.traced_name
    return name


def layout_in_trace(spec: Any) -> Layout:
    """The layout of a Spec, as an object that may be handed on."""
    layout: Layout = getattr(_held, asked(_hold, spec))
    return layout


# --- Local functions ----------------------------------------------------------------------------

_kept: dict[str, Any] = {}


def run_local(name: str, tensors: list[Tensor]) -> Any:
    """Under torch.compile: `local(tensors)` of the object with this name. It lives as long as the process then."""
    asked(_keep, name)
    return run_kept(name, tensors)


def _keep(value: Any) -> None:
    _kept[value.traced_name] = value


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_kept(name: str, tensors: list[Tensor]) -> Any:
    out = _kept[name].local(tensors)
    return out if isinstance(out, Tensor) else tuple(out)


# --- Values of a trace --------------------------------------------------------------------------


class _Answer(threading.local):
    is_argument = False


_answer = _Answer()


def _look(context: Any) -> None:
    variable = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _answer.is_argument = variable.source is not None


def _seen() -> bool:
    return _answer.is_argument


def is_argument(value: Any) -> bool:
    """Under torch.compile: does `value` come from outside of what is compiled?"""
    torch._dynamo.comptime.comptime(_look)
    answer: bool = asked(_seen)
    return answer


def _teach_matmul() -> None:
    """Dynamo calls the methods of plain objects for +, but not for @."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    names = ["__matmul__", "__rmatmul__", "__imatmul__"]
    BuiltinVariable._binops().setdefault(operator.matmul, (names, operator.imatmul))
    BuiltinVariable._binop_handlers.cache_clear()


def _teach_tuples() -> None:
    """Dynamo looks for values with __torch_function__ in lists and dicts, but not in tuples."""
    from torch._dynamo.variables import torch_function
    from torch._dynamo.variables.lists import TupleVariable

    module: Any = torch_function
    flatten = getattr(module, "_flatten_vts", None)
    if flatten is None:  # another torch's Dynamo
        return

    def flatten_tuples(values: Iterable[Any]) -> list[Any]:
        found = []
        for value in flatten(values):
            is_tuple = value.is_realized() and isinstance(value, TupleVariable)
            found += flatten_tuples(value.items) if is_tuple else [value]
        return found

    module._flatten_vts = flatten_tuples


_teach_matmul()
_teach_tuples()
torch.compiler.allow_in_graph(F.rms_norm)  # as the other norms are, or Dynamo stumbles over a weight that is None
