"""Checkpoints of modules from shard_module, and of their optimizers, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_overlap import _optimizer_state
from torch_overlap._C import InvalidTypeError, InvalidValueError
from torch_overlap.mesh.dtensor import placements_of, to_dtensor
from torch_overlap.mesh.module import named_values
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import spec_of

__all__ = [
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
]


def _kept(module: nn.Module) -> dict[str, Sharded]:
    """Returns the Sharded values of `module.state_dict()`, under all their names."""
    by_id = {
        id(value.local): value for what in ("_parameters", "_buffers") for value in named_values(module, what).values()
    }
    return {name: by_id[id(value)] for name, value in module.state_dict(keep_vars=True).items() if id(value) in by_id}


@torch.no_grad()
def sharded_state_dict(module: nn.Module, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Returns `module.state_dict()` as DTensors, which torch.distributed.checkpoint saves, and loads on any mesh.

    They share memory with the parameters and buffers. Nothing is sent.

    Args:
        module: a module that shard_module sharded.
        device_mesh: a mesh of the shape and ranks of the module's mesh.

    Raises:
        InvalidValueError: another mesh.
        UnsupportedError: a layout that DTensor cannot express, as in `to_dtensor`.
    """
    kept = _kept(module)
    return {name: _as_dtensor(name, value, kept[name], device_mesh) if name in kept else value
            for name, value in module.state_dict().items()}  # fmt: skip


@torch.no_grad()
def load_sharded_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads the result of `sharded_state_dict` after torch.distributed.checkpoint has filled it. Nothing is sent.

    Args:
        module: a module that shard_module sharded.
        state: the values by name.
        strict: as for `module.load_state_dict`.

    Returns: the result of `module.load_state_dict`.

    Raises:
        InvalidTypeError, InvalidValueError: a value is not a DTensor, or has another layout. Nothing is changed then.
        RuntimeError: as from `module.load_state_dict`.
    """
    parts = dict(state)
    for name, value in _kept(module).items():
        if name in parts:
            parts[name] = _from_dtensor(name, parts[name], value)
    return module.load_state_dict(parts, strict=strict)


def sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the state of an optimizer of `module` as DTensors, like `sharded_state_dict`.

    The names are those of `get_optimizer_state_dict` of torch.distributed.checkpoint.state_dict. The state is complete
    even before the first step. Nothing is sent.

    Args:
        module: a module that shard_module sharded.
        optimizer: an optimizer of its parameters.
        device_mesh: as for `sharded_state_dict`.

    Raises:
        InvalidValueError, UnsupportedError: as `sharded_state_dict`.
        ValueError: a state has another shape than this rank's part of its parameter.
    """
    wrap = {of: partial(_as_dtensor, value=value, device_mesh=device_mesh) for of, value in _by_id(module).items()}
    return _optimizer_state.sharded(module, optimizer, wrap)


@torch.no_grad()
def load_sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the result of `sharded_optimizer_state_dict` after torch.distributed.checkpoint has filled it.

    Nothing is sent.

    Args:
        module: a module that shard_module sharded.
        optimizer: an optimizer of its parameters.
        state: the values by name.

    Raises:
        InvalidTypeError, InvalidValueError: as `load_sharded_state_dict`.
    """
    unwrap = {of: partial(_from_dtensor, value=value) for of, value in _by_id(module).items()}
    _optimizer_state.load(module, optimizer, state, unwrap)


def _by_id(module: nn.Module) -> dict[int, Sharded]:
    return {id(value.local): value for value in named_values(module, "_parameters").values()}


def _as_dtensor(name: str, local: Tensor, value: Sharded, device_mesh: DeviceMesh) -> DTensor:
    """Returns `local`, which has the layout of `value` and may have another dtype, as a DTensor."""
    return to_dtensor(Sharded(local, spec_of(value.mesh, value.layout, value.shape, local.dtype)), device_mesh)


def _from_dtensor(name: str, found: object, value: Sharded) -> Tensor:
    if not isinstance(found, DTensor):
        raise InvalidTypeError(
            f"load_sharded_state_dict: expected a DTensor for '{name}', got {type(found).__name__}; load into what "
            "sharded_state_dict gives (whole tensors: load_full_state_dict)"
        )
    wanted = (tuple(value.shape), placements_of(value.layout))
    if (tuple(found.shape), found.placements) != wanted:
        raise InvalidValueError(
            f"load_sharded_state_dict: expected {wanted} for '{name}', got {(tuple(found.shape), found.placements)}; "
            "load into what sharded_state_dict of this module gives"
        )
    local: Tensor = found.to_local()
    return local
