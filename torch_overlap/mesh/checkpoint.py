"""What shard_module made and its optimizer keeps, for torch.distributed.checkpoint."""

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
    """What `module.state_dict()` has, under all its names, as it lies."""
    by_id = {
        id(value.local): value for what in ("_parameters", "_buffers") for value in named_values(module, what).values()
    }
    return {name: by_id[id(value)] for name, value in module.state_dict(keep_vars=True).items() if id(value) in by_id}


@torch.no_grad()
def sharded_state_dict(module: nn.Module, device_mesh: DeviceMesh) -> dict[str, Any]:
    """`module.state_dict()` as DTensors: what torch.distributed.checkpoint saves, and loads on any mesh.

    They share memory with the parameters and buffers. Nothing is sent.

    Args:
        device_mesh: of the shape and ranks of the module's mesh.

    Raises:
        InvalidValueError: another mesh.
        UnsupportedError: a layout that DTensor has no words for, as `to_dtensor` says.
    """
    kept = _kept(module)
    return {name: _as_dtensor(name, value, kept[name], device_mesh) if name in kept else value
            for name, value in module.state_dict().items()}  # fmt: skip


@torch.no_grad()
def load_sharded_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads what `sharded_state_dict` gave, and torch.distributed.checkpoint has put values into. Nothing is sent.

    Returns: what `module.load_state_dict` does.

    Raises:
        InvalidTypeError, InvalidValueError: no DTensor, or one that lies otherwise; nothing is changed then.
        RuntimeError: as from `module.load_state_dict`.
    """
    parts = dict(state)
    for name, value in _kept(module).items():
        if name in parts:
            parts[name] = _from_dtensor(name, parts[name], value)
    return module.load_state_dict(parts, strict=strict)


def sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, device_mesh: DeviceMesh) -> dict[str, Any]:
    """The state of an optimizer of `module`, as `sharded_state_dict` has the module's.

    With the names of `get_optimizer_state_dict` of torch.distributed.checkpoint.state_dict, and like it complete also
    before the first step. Nothing is sent.

    Raises:
        InvalidValueError, UnsupportedError: as `sharded_state_dict`.
        ValueError: a state has another shape than this rank's part of its parameter.
    """
    wrap = {of: partial(_as_dtensor, value=value, device_mesh=device_mesh) for of, value in _by_id(module).items()}
    return _optimizer_state.sharded(module, optimizer, wrap)


@torch.no_grad()
def load_sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads what `sharded_optimizer_state_dict` gave, and torch.distributed.checkpoint has put values into.

    Nothing is sent.

    Raises:
        InvalidTypeError, InvalidValueError: as `load_sharded_state_dict`.
    """
    unwrap = {of: partial(_from_dtensor, value=value) for of, value in _by_id(module).items()}
    _optimizer_state.load(module, optimizer, state, unwrap)


def _by_id(module: nn.Module) -> dict[int, Sharded]:
    return {id(value.local): value for value in named_values(module, "_parameters").values()}


def _as_dtensor(name: str, local: Tensor, value: Sharded, device_mesh: DeviceMesh) -> DTensor:
    """`local`, which lies as `value`, and may have another dtype."""
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
