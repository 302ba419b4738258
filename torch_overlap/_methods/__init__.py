"""The public methods of the classes of `_C`, as Python functions.

`_C` has each of them under the same name with a leading underscore, and takes all arguments by position. The function
here has the signature, the defaults and the documentation, and names the argument in errors (`arguments.checked`). One
without arguments has no body: it declares the method of `_C`, which is called directly and must exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch_overlap import _C
from torch_overlap._methods import c10d, collectives, communicator, values, window, works
from torch_overlap._methods.arguments import checked
from torch_overlap._methods.documented import documented

__all__ = ["get_comm", "get_window"]

# Functions without arguments that have a body.
_DEFINED_HERE = (communicator.get_mem_allocator,)


def _set_method(
    owner: type, function: Callable[..., Any], op: str | None = None, compiled: Callable[..., Any] | None = None
) -> None:
    """Makes `function`, or the method of `_C` that it declares, a method of `owner`."""
    function.__qualname__ = f"{owner.__name__}.{function.__name__}"
    setattr(owner, function.__name__, checked(function, op, compiled))


def _take_declared(owner: type, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Removes the method of `_C` that a function without arguments declares from the class, and returns it."""
    if len(inspect.signature(function).parameters) > 1 or function in _DEFINED_HERE:
        return None
    name = f"_{function.__name__}"
    compiled: Callable[..., Any] = getattr(owner, name)
    delattr(owner, name)
    return compiled


def _functions(module: ModuleType) -> list[FunctionType]:
    """Returns the public functions that a module defines."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _set_constructor(owner: type, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Wraps the constructor of the compiled class with a typed one."""
    _set_method(owner, make(owner.__init__), owner.__name__.lstrip("_"))  # type: ignore[misc]


_METHODS: dict[type, Sequence[Callable[..., Any]]] = {
    _C.TorchComm: [*_functions(collectives), *_functions(communicator)],
    _C.TorchCommWindow: _functions(window),
    _C.TorchWork: [works.wait, works.wait_blocking, works.is_completed, works.status, works.exception],
    _C.BatchSendRecv: [works.send, works.recv, works.issue],
    _C.RemovableHandle: [works.remove],
    _C._BackendWrapper: [c10d.get_comm, c10d.new_window],
}
_OPERATIONS: tuple[Callable[..., Any], ...] = (
    *_functions(collectives),
    works.issue,
    window.put,
    window.signal,
    window.wait_signal,
)
for _operation in _OPERATIONS:
    documented(_operation)
for _owner, _all in _METHODS.items():
    for _function in _all:
        _set_method(_owner, _function, compiled=_take_declared(_owner, _function))
_set_constructor(_C.P2POp, values.constructor_of_p2p)
_set_constructor(_C.ReduceOp, values.constructor_of_reduce_op)
_set_constructor(_C._BackendWrapper, c10d.constructor_of_wrapper)
_OPTIONS = {
    _C.CommOptions: values.constructor_of_comm_options,
    _C.BackendOptions: c10d.constructor_of_options,
    _C.SendOptions: values.constructor_of_tagged_options,
    _C.RecvOptions: values.constructor_of_tagged_options,
}
for _name, _kind in vars(_C).items():
    if _name.endswith("Options"):
        _set_constructor(_kind, _OPTIONS.get(_kind, values.constructor_of_options))
setattr(_C.ReduceOp, "PREMUL_SUM", staticmethod(checked(values.PREMUL_SUM, "ReduceOp.PREMUL_SUM")))  # noqa: B010

get_comm = checked(values.get_comm)
get_window = checked(values.get_window)
