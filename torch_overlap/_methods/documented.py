"""Completes the docstrings of operations with what all of them have in common.

An operation's own docstring has a summary, its own arguments under "Args:" and, at its end, an "Example:". The sections
that are added stand between these two.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

_ARGUMENTS = {
    "async_op": "if True, the operation runs in the background: call wait() on the work before using the results. If "
    "False, they are ready for the work that follows (see Streams).",
    "hints": 'strings for the backend, such as {"is_high_priority_stream": "true"}. A warning names unknown ones.',
    "timeout": "of this operation. None means the communicator's.",
    "options": "hints, timeout (and tag) in one object. Keywords override it.",
}
_RETURNS = "The work. It keeps the tensors alive until the operation has ended."
_STREAMS = """On CUDA with async_op=False, the operation runs on the current stream, and the host does not wait. With
async_op=True it runs on a stream of the communicator, after everything that is enqueued on the current stream
at the call; wait() makes the then current stream wait for it. On the CPU, async_op=False returns when the
operation has ended, and wait() blocks the thread."""
_RAISES = {
    "InvalidTypeError": "an argument does not have the documented type, device or dtype. Nothing was sent.",
    "InvalidValueError": "a shape, size, rank or other value does not fit. Nothing was sent.",
    "UnsupportedError": "the backend cannot do this.",
    "StateError": "the communicator was finalized, aborted or has failed.",
    "OperationTimeoutError": "another rank did not arrive in time: from this call, from wait(), or from a later call.",
}


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the arguments that the function shares with others, and Returns, Streams and Raises, to its docstring."""
    own = inspect.getdoc(function) or ""
    body, _, example = own.partition("\n\nExample:\n")
    if "\nArgs:\n" not in f"\n{body}":
        body += "\n\nArgs:"
    given = inspect.signature(function).parameters
    body += "".join(_entry(name, text) for name, text in _ARGUMENTS.items() if _is_missing(name, given, body))
    sections = [body, f"Returns:\n{_indented(_RETURNS)}", f"Streams:\n{_indented(_STREAMS)}"]
    sections.append("Raises:" + "".join(_entry(name, text) for name, text in _RAISES.items()))
    if example:
        sections.append(f"Example:\n{example}")
    function.__doc__ = "\n\n".join(sections) + "\n"
    return function


def _is_missing(name: str, given: Any, body: str) -> bool:
    return name in given and f"\n    {name}:" not in body


def _entry(name: str, text: str) -> str:
    return "\n" + textwrap.fill(f"{name}: {text}", 116, initial_indent="    ", subsequent_indent="        ")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
