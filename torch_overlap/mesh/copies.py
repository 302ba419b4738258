"""The moved copies of Sharded values, and what makes one invalid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_overlap.mesh.dynamo import is_dynamo_compiling

if TYPE_CHECKING:
    from torch_overlap.mesh.value_spec import ValueSpec

__all__ = ["UNCHANGED", "MovedCopies", "State", "is_hooked", "state_of"]

State = tuple[int, bool]
UNCHANGED: State = (0, False)


def state_of(value: Any) -> State:
    """Returns what an operation in place changes of a tensor or a Sharded: its number of writes, also through views,
    and requires_grad. torch counts no writes to inference tensors; in a trace the state is constant."""
    if is_dynamo_compiling():
        return UNCHANGED
    if not isinstance(value, Tensor):
        state: State = value._state()
        return state
    return (0 if value.is_inference() else value._version), value.requires_grad


def is_hooked(tensor: Tensor) -> bool:
    """Returns True if the backward pass runs hooks on the tensor, or leaves its gradient."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


class _CachedCopy(NamedTuple):
    """A copy, its ValueSpec if it is in another layout, and the states of the value and the copy when it was made."""

    copy: Any
    spec: ValueSpec | None
    value_state: State
    copy_state: State

    def is_valid(self, value_state: State) -> bool:
        return self.value_state == value_state and self.copy_state == state_of(self.copy)


class MovedCopies:
    """The copies of a function's result in other layouts and dtypes that functions needed.

    A copy is valid in the grad and inference modes that it was made in, until it or the value changes in place. Ranks
    that change values alike find the same copies. `state`, in each method, is that of the value now.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, tuple[bool, bool]], _CachedCopy] = {}

    def find(self, what: str, state: State) -> Any:
        """Returns the valid copy in a layout, or dtype; None if there is none."""
        found = self._copies.get((what, _modes()))
        return None if found is None or not found.is_valid(state) else found.copy

    def find_reduced(self, state: State) -> tuple[Tensor, ValueSpec] | None:
        """Returns the first valid copy that is not partial, and its ValueSpec; None if there is none."""
        modes = _modes()
        for (_, copy_modes), cached in self._copies.items():
            if cached.spec is not None and cached.spec.is_reduced and copy_modes == modes and cached.is_valid(state):
                return cached.copy, cached.spec
        return None

    def add(self, what: str, copy: Any, spec: ValueSpec | None, state: State) -> None:
        """Keeps a copy, with its ValueSpec if it is in another layout."""
        self._copies[what, _modes()] = _CachedCopy(copy, spec, state, state_of(copy))


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), not is_dynamo_compiling() and torch.is_inference_mode_enabled()
