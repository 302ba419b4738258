"""Methods of tensors, and operators on them, that Sharded does not support, with their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch_overlap._C import UnsupportedError
from torch_overlap.mesh.aten_call import AtenCall

__all__ = ["UNSUPPORTED_METHODS", "refuse_parameter", "refuse_strides"]

_OF_MEMORY = "data_ptr untyped_storage storage storage_type is_set_to is_shared is_pinned register_hook"
_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift setitem"


def _unsupported_error(name: str, text: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: {text}")

    method.__doc__ = f"Raises UnsupportedError: {text}."
    return method


_MEMORY = "expected a tensor with memory of its own, got a Sharded; ask its .local"
_CHANGES = (
    "expected a function that changes no Sharded, got one in place; use the form that returns a new one, or work on "
    ".local"
)

_VALUES = "expected values of a Sharded, got those of every rank; call shard(torch.tensor(values), mesh)"

UNSUPPORTED_METHODS = {name: _unsupported_error(name, _MEMORY) for name in _OF_MEMORY.split()} | {
    f"__{name}__": _unsupported_error(name, _CHANGES) for name in _IN_PLACE.split()
} | {"new_tensor": _unsupported_error("new_tensor", _VALUES)}  # fmt: skip

refuse_parameter = _unsupported_error(
    "Parameter", "expected a plain tensor, got a Sharded; call shard_module(module, mesh, layouts) on its module"
)

_STRIDED = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})


def refuse_strides(call: AtenCall) -> None:
    """Raises UnsupportedError if the operator addresses memory by strides: those of local tensors depend on the
    layout."""
    if call.name in _STRIDED:
        raise UnsupportedError(
            f"{call.name}: expected a function of the elements of a value, got one of its memory, and a Sharded has no "
            "strides. Call unfold, narrow, diagonal or reshape, or take .local or .full()."
        )
