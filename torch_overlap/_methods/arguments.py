"""Raises an InvalidTypeError that names the argument if a call does not match a function's signature.

    all_reduce: expected a torch.Tensor for tensor, got numpy.ndarray; convert it with torch.from_numpy

A correct call costs one more Python frame: the annotations are read only after a TypeError.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch._C._distributed_c10d import Store

from torch_overlap._C import Error, InvalidTypeError

F = TypeVar("F", bound=Callable[..., Any])

_NAMES: dict[Any, str] = {
    torch.Tensor: "a torch.Tensor",
    torch.device: "a torch.device",
    timedelta: "a datetime.timedelta",
    Store: "a torch.distributed.Store",
    int: "an int",
    float: "a number",
    bool: "a bool",
    str: "a string",
}
_FIXES = {
    (torch.Tensor, "numpy.ndarray"): "convert it with torch.from_numpy",
    (timedelta, "int"): "write timedelta(seconds=...)",
    (timedelta, "float"): "write timedelta(seconds=...)",
}


def checked(function: F, name: str | None = None, compiled: Callable[..., Any] | None = None) -> F:
    """Returns `function`, or `compiled` with its signature, with TypeErrors that name the argument. `name` is used in
    errors; default: the function's name."""
    op = name or function.__name__
    target = compiled or function

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return target(*args, **keywords)
        except TypeError as error:
            if not isinstance(error, Error):
                check_arguments(op, function, args, keywords)
            raise

    return call  # type: ignore[return-value]


def checked_first(function: F) -> F:
    """Returns `function` with its arguments checked before each call, for calls that cost more than the check."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        check_arguments(function.__name__, function, args, keywords)
        return function(*args, **keywords)

    return call  # type: ignore[return-value]


def check_arguments(op: str, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Checks the arguments of a call against the signature of `function`, except `self`.

    Raises:
        InvalidTypeError: an argument is missing, unknown or given twice, or does not have the type of its annotation.
    """
    parameters = dict(inspect.signature(function).parameters)
    if "self" in parameters:
        del parameters["self"]
        args = args[1:]
    given = _bind(op, parameters, args, keywords)
    hints = get_type_hints(function)
    for name, value in given.items():
        _check(op, name, hints.get(name, Any), value)


def _bind(
    op: str, parameters: Mapping[str, inspect.Parameter], args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the value that a call passes for each parameter."""
    by_position = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    if len(args) > len(by_position):
        most = f"at most {len(by_position)} arguments ({', '.join(by_position)})" if by_position else "no arguments"
        raise InvalidTypeError(f"{op}: expected {most} by position, got {len(args)}")
    given = dict(zip(by_position, args, strict=False))
    for name, value in keywords.items():
        if name not in parameters:
            known = f"one of the keywords {', '.join(parameters)}" if parameters else "no keywords"
            raise InvalidTypeError(f"{op}: expected {known}, got {name}={describe(value)}")
        if name in given:
            raise InvalidTypeError(f"{op}: expected {name} once, got it by position and as a keyword")
        given[name] = value
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given:
            raise InvalidTypeError(f"{op}: expected a value for {name}, got none; pass {name}=...")
    return given


def _check(op: str, name: str, hint: Any, value: Any) -> None:
    if fits(value, hint):
        return
    choices = [choice for choice in _choices(hint) if choice is not types.NoneType]
    if len(choices) == 1 and get_origin(choices[0]) is Sequence and _is_sequence(value):
        (element,) = get_args(choices[0])
        for index, one in enumerate(value):
            _check(op, f"{name}[{index}]", element, one)
    _refuse(op, name, choices, value)


def _refuse(op: str, name: str, choices: Sequence[Any], value: Any) -> NoReturn:
    expected = " or ".join(_type_text(choice) for choice in choices)
    fix = next((_FIXES[c, _type_name(value)] for c in choices if (c, _type_name(value)) in _FIXES), None)
    raise InvalidTypeError(
        f"{op}: expected {expected} for {name}, got {describe(value)}" + (f"; {fix}" if fix is not None else "")
    )


def fits(value: Any, hint: Any) -> bool:
    """Returns True if a value has the type of an annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in get_args(hint))
    if origin is Sequence:
        return _is_sequence(value) and all(fits(one, get_args(hint)[0]) for one in value)
    if origin is Mapping:
        keys, values = get_args(hint)
        return isinstance(value, Mapping) and all(fits(k, keys) and fits(v, values) for k, v in value.items())
    if origin is Callable:
        return callable(value)
    if hint is Any or hint is object:
        return True
    if hint is int:
        return isinstance(value, SupportsIndex)
    if hint is float:
        return isinstance(value, int | float)
    if hint is bool:
        return isinstance(value, bool) or _type_name(value) in ("numpy.bool", "numpy.bool_")
    return isinstance(value, origin or hint)


def describe(value: Any) -> str:
    """Returns a value's text for errors, such as 5 (int). Only the type if the text may be long or the value is on a
    GPU."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {_name(value)}"
    if not isinstance(value, int | float | str):
        return _type_name(value)
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({_type_name(value)})"


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _type_name(value: Any) -> str:
    return _name(type(value))


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{'torch_overlap' if kind.__module__ == 'torch_overlap._C' else kind.__module__}.{kind.__qualname__}"


def _type_text(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Sequence:
        return f"a sequence of {_plural(get_args(hint)[0])}"
    if origin is Mapping:
        return "a dict of strings"
    if origin is Callable:
        return "a callable"
    if hint in _NAMES:
        return _NAMES[hint]
    return f"a {_name(origin or hint)}"


def _plural(hint: Any) -> str:
    return _type_text(hint).split(" ", 1)[1] + "s"
