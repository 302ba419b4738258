"""Sharded values under torch.compile.

Dynamo traces the code of Sharded. Values that depend only on layouts, shapes and arguments are evaluated once
(`as_dynamo_constant`) and kept as constants: the ValueSpec of a value, the target of a move, the recipe of a function.
A rank's computation on its local tensors is one call in Dynamo's graph (`run_local_function`); compilers see its
operators and collectives one level below.

A compiled function is guarded by the ValueSpecs of its arguments: another layout, shape, dtype or mesh compiles again.

All of this uses torch.compiler and pytree constants only; nothing reaches into Dynamo.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_overlap._C import MeshComms
from torch_overlap.mesh._core import Layout

torch.utils._pytree.register_constant(Layout)

__all__ = [
    "NOT_IN_A_GRAPH",
    "DynamoConstant",
    "as_dynamo_constant",
    "cache_in_dynamo",
    "caching_moves",
    "is_dynamo_compiling",
    "layout_in_dynamo",
    "register_constant",
    "run_in_graph",
]

NOT_IN_A_GRAPH = "backward passes of Sharded values run outside of the graph: call backward or grad after the function"

_NAME_PREFIX = "torch_overlap_mesh_"
_counter = itertools.count()
_objects_by_name: WeakValueDictionary[str, Any] = WeakValueDictionary()


def register_constant(value: Any) -> str:
    """Returns a name for an object, under which functions of `as_dynamo_constant` receive it: Dynamo guards strings and
    can pass them on."""
    name = f"{_NAME_PREFIX}{next(_counter)}"
    _objects_by_name[name] = value
    return name


class DynamoConstant:
    """An object that may be an argument of `as_dynamo_constant`."""

    __slots__ = ("__weakref__", "constant_name")

    def __init__(self) -> None:
        self.constant_name = register_constant(self)


# --- Constants of a trace -----------------------------------------------------------------------


def as_dynamo_constant(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`. Under torch.compile it runs during tracing, and the result is a constant of the
    compiled function.

    Arguments are constants: plain values, torch's own, DynamoConstant objects and meshes, in lists, tuples and dicts.
    """
    return _call_in_trace(function, _as_constant(args)) if is_dynamo_compiling() else function(*args)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call_in_trace(function: Callable[..., Any], args: Any) -> Any:
    return function(*_resolve_names(args))


def _as_constant(value: Any) -> Any:
    """Returns an argument in a form that Dynamo treats as a constant."""
    if isinstance(value, DynamoConstant):
        return value.constant_name
    if isinstance(value, MeshComms):
        return value.constant_name
    if isinstance(value, int) and not isinstance(value, bool):
        return int(f"{value}")  # if Dynamo made it a symbol, this fixes its value and guards it
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, list):
        return [_as_constant(item) for item in value]
    if isinstance(value, tuple):  # includes torch.Size and P
        return tuple([_as_constant(item) for item in value])
    if isinstance(value, dict):
        return {name: _as_constant(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(_as_constant(value.start), _as_constant(value.stop), _as_constant(value.step))
    return value


def _resolve_names(value: Any) -> Any:
    kind = type(value)
    if kind is str and value.startswith(_NAME_PREFIX):
        return _objects_by_name[value]
    if kind is list or kind is tuple:
        return kind(map(_resolve_names, value))
    if kind is dict:
        return {name: _resolve_names(item) for name, item in value.items()}
    return value


class _DynamoLayouts:
    """Constants that a trace reads as attributes, so that Dynamo can pass them on."""


_dynamo_layouts = _DynamoLayouts()


def _add_dynamo_layout(spec: Any) -> str:
    setattr(_dynamo_layouts, spec.constant_name, spec.layout)
    name: str = spec.constant_name
    return name


def layout_in_dynamo(spec: Any) -> Layout:
    """Returns the layout of a ValueSpec, as an object that Dynamo can pass on."""
    layout: Layout = getattr(_dynamo_layouts, as_dynamo_constant(_add_dynamo_layout, spec))
    return layout


# --- Local functions ----------------------------------------------------------------------------

_local_functions: dict[str, Any] = {}


def run_in_graph(name: str, tensors: list[Tensor]) -> Any:
    """Under torch.compile, calls `run_local` of the object with this name, and keeps the object alive."""
    as_dynamo_constant(_keep_local_function, name)
    return run_local_function(name, tensors)


def _keep_local_function(value: Any) -> None:
    _local_functions[value.constant_name] = value


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_local_function(name: str, tensors: list[Tensor]) -> Any:
    out = _local_functions[name].run_local(tensors)
    return out if isinstance(out, Tensor) else tuple(out)


# --- Moved copies -------------------------------------------------------------------------------


class _Caching(Protocol):
    def _stop_caching(self) -> None: ...


class _Block:
    """The innermost block of `caching_moves` in a trace. Only traces write to it, and leave it as they found it.

    Attributes:
        values: Those that cache their moved copies until the block ends; None outside.
    """

    def __init__(self) -> None:
        self.values: list[_Caching] | None = None


_block = _Block()


def cache_in_dynamo(value: _Caching) -> bool:
    """Returns True if `value`, which a trace makes now, is to cache its moved copies: inside `caching_moves`."""
    if _block.values is None:
        return False
    _block.values.append(value)
    return True


@contextlib.contextmanager
def caching_moves() -> Iterator[None]:
    """Under torch.compile, functions' results inside the block cache their moved copies until its end.

        @torch.compile(fullgraph=True)
        def qkv(x, wq, wk, wv):
            with to.mesh.caching_moves():
                x = F.layer_norm(x, x.shape[-1:])
                return [F.linear(x, w) for w in (wq, wk, wv)]  # x is gathered once

    Without it, a compiled function moves a value once for each function that needs it in another layout. The forward of
    a module that `shard_module` returns, and of those in it that have children, is such a block. Eager mode caches
    without it. Values must not be changed in place inside the block.
    """
    if not is_dynamo_compiling() or _block.values is not None:
        yield
        return
    _block.values = []
    try:
        yield
    finally:
        for value in _block.values:
            value._stop_caching()
        _block.values = None
