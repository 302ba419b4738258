"""Sharded values under torch.compile.

Dynamo traces the code of Sharded. Values that depend only on layouts, shapes and arguments are evaluated once
(`as_trace_constant`) and kept as constants: the Spec of a value, the target of a move, the recipe of a function. A
rank's computation on its local tensors is one call in Dynamo's graph (`run_local_function`); compilers see its
operators and collectives one level below.

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
    "TraceConstant",
    "as_constant",
    "as_trace_constant",
    "is_argument",
    "is_dynamo_compiling",
    "layout_in_trace",
    "register_traced",
    "run_in_graph",
]

_MARK = "torch_overlap_mesh_"
_counter = itertools.count()
_objects_by_name: WeakValueDictionary[str, Any] = WeakValueDictionary()


def register_traced(value: Any) -> str:
    """Returns a name for an object, under which functions of `as_trace_constant` receive it: Dynamo guards strings and
    can pass them on."""
    name = f"{_MARK}{next(_counter)}"
    _objects_by_name[name] = value
    return name


class TraceConstant:
    """An object that may be an argument of `as_trace_constant`."""

    __slots__ = ("__weakref__", "traced_name")

    def __init__(self) -> None:
        self.traced_name = register_traced(self)


# --- Constants of a trace -----------------------------------------------------------------------


def as_trace_constant(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`. Under torch.compile it runs during tracing, and the result is a constant of the
    compiled function.

    Arguments are constants: plain values, torch's own, TraceConstant objects and meshes, in lists, tuples and dicts.
    """
    return _asked(function, as_constant(args)) if is_dynamo_compiling() else function(*args)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asked(function: Callable[..., Any], args: Any) -> Any:
    return function(*_resolve_names(args))


def as_constant(value: Any) -> Any:
    """Returns an argument in a form that Dynamo treats as a constant."""
    if isinstance(value, TraceConstant):
        return value.traced_name
    if isinstance(value, MeshComms):
        return value.traced_name
    if isinstance(value, int) and not isinstance(value, bool):
        return int(f"{value}")  # if Dynamo made it a symbol, this fixes its value and guards it
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, list):
        return [as_constant(item) for item in value]
    if isinstance(value, tuple):  # includes torch.Size and P
        return tuple([as_constant(item) for item in value])
    if isinstance(value, dict):
        return {name: as_constant(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(as_constant(value.start), as_constant(value.stop), as_constant(value.step))
    return value


def _resolve_names(value: Any) -> Any:
    kind = type(value)
    if kind is str and value.startswith(_MARK):
        return _objects_by_name[value]
    if kind is list or kind is tuple:
        return kind(map(_resolve_names, value))
    if kind is dict:
        return {name: _resolve_names(item) for name, item in value.items()}
    return value


class _TraceLayouts:
    """Constants that a trace reads as attributes, so that Dynamo can pass them on."""


_trace_layouts = _TraceLayouts()


def _add_trace_layout(spec: Any) -> str:
    setattr(_trace_layouts, spec.traced_name, spec.layout)
    name: str = spec.traced_name
    return name


def layout_in_trace(spec: Any) -> Layout:
    """Returns the layout of a Spec, as an object that Dynamo can pass on."""
    layout: Layout = getattr(_trace_layouts, as_trace_constant(_add_trace_layout, spec))
    return layout


# --- Local functions ----------------------------------------------------------------------------

_local_functions: dict[str, Any] = {}


def run_in_graph(name: str, tensors: list[Tensor]) -> Any:
    """Under torch.compile, runs `local(tensors)` of the object with this name. It then lives as long as the process."""
    as_trace_constant(_keep_local_function, name)
    return run_local_function(name, tensors)


def _keep_local_function(value: Any) -> None:
    _local_functions[value.traced_name] = value


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_local_function(name: str, tensors: list[Tensor]) -> Any:
    out = _local_functions[name].local(tensors)
    return out if isinstance(out, Tensor) else tuple(out)


# --- Values of a trace --------------------------------------------------------------------------


class _ComptimeResult(threading.local):
    is_argument = False


_comptime_result = _ComptimeResult()


def _inspect_variable(context: Any) -> None:
    variable = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _comptime_result.is_argument = variable.source is not None


def _was_argument() -> bool:
    return _comptime_result.is_argument


def is_argument(value: Any) -> bool:
    """Under torch.compile, returns True if `value` comes from outside the compiled code."""
    torch._dynamo.comptime.comptime(_inspect_variable)
    answer: bool = as_trace_constant(_was_argument)
    return answer


def _patch_dynamo_matmul() -> None:
    """Makes Dynamo call the methods of plain objects for @, as it does for +."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    names = ["__matmul__", "__rmatmul__", "__imatmul__"]
    BuiltinVariable._binops().setdefault(operator.matmul, (names, operator.imatmul))
    BuiltinVariable._binop_handlers.cache_clear()


def _patch_dynamo_tuples() -> None:
    """Makes Dynamo look for values with __torch_function__ in tuples, as it does in lists and dicts."""
    from torch._dynamo.variables import torch_function
    from torch._dynamo.variables.lists import TupleVariable

    module: Any = torch_function
    flatten = getattr(module, "_flatten_vts", None)
    if flatten is None:  # another torch version's Dynamo
        return

    def flatten_tuples(values: Iterable[Any]) -> list[Any]:
        found = []
        for value in flatten(values):
            is_tuple = value.is_realized() and isinstance(value, TupleVariable)
            found += flatten_tuples(value.items) if is_tuple else [value]
        return found

    module._flatten_vts = flatten_tuples


_patch_dynamo_matmul()
_patch_dynamo_tuples()
torch.compiler.allow_in_graph(F.rms_norm)  # like the other norms; Dynamo otherwise fails on a weight that is None
