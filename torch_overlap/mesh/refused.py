"""Methods of tensors that a Sharded has not: what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch_overlap._C import UnsupportedError

__all__ = ["REFUSED"]

_OF_MEMORY = "data_ptr untyped_storage storage storage_type is_set_to is_shared is_pinned register_hook"
_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor setitem"


def _refusal(name: str, text: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: {text}")

    method.__doc__ = f"Raises UnsupportedError: {text}."
    return method


_MEMORY = "expected a tensor with memory of its own, got a Sharded; ask its .local"
_CHANGES = (
    "expected a function that changes no Sharded, got one in place; use the form that returns a new one, or work on "
    ".local"
)

REFUSED = {name: _refusal(name, _MEMORY) for name in _OF_MEMORY.split()} | {
    f"__{name}__": _refusal(name, _CHANGES) for name in _IN_PLACE.split()
}
