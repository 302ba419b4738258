"""Checkpoints for any number of ranks.

`module.state_dict()` itself has DTensors for layers over a mesh, which torch's own functions save and load, and this
rank's parts for layers over a TorchComm.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim import Optimizer

from torch_overlap import _optimizer_state, ops
from torch_overlap._C import TorchComm
from torch_overlap._dtensor import from_local
from torch_overlap.nn.layout import layouts, whole_shape


def _split(module: nn.Module) -> dict[int, tuple[Tensor, TorchComm, int]]:
    """Returns id of a parameter that is this rank's part -> the parameter, its communicator and dimension."""
    return {id(parameter): (parameter, layout.comm, layout.split[name]) for _, child, layout in layouts(module)
            for name, parameter in child.named_parameters(recurse=False)
            if layout.mesh is None and name in layout.split}  # fmt: skip


def _splits(module: nn.Module) -> dict[str, tuple[TorchComm, int]]:
    """Returns key in the state dict -> communicator and dimension, for parameters that are this rank's part.

    Matches the parameters by identity: wrappers (of activation checkpointing, for example) change their names in the
    state dict.
    """
    split, state = _split(module), module.state_dict(keep_vars=True)
    return {key: split[id(value)][1:] for key, value in state.items() if id(value) in split}


@torch.no_grad()
def full_state_dict(module: nn.Module, *, offload_to_cpu: bool = False) -> dict[str, Any]:
    """Returns `module.state_dict()` with every split parameter gathered: the same keys, whole tensors, on every rank.

    Collective over the communicators of the layers, and the meshes of DTensors (`fully_shard`). The keys of a layer
    with one output are those of nn.Linear, so the result loads into the unsharded model. Gathered tensors are new; the
    others are those of state_dict().

    Args:
        module: the module with the layers.
        offload_to_cpu: if True, moves each tensor to the CPU before the next is gathered.
    """
    splits = _splits(module)
    full: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if key in splits:
            comm, dim = splits[key]
            value = ops.all_gather(value, comm, dim)
        full[key] = value.cpu() if offload_to_cpu and isinstance(value, Tensor) else value
    return full


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads the result of `full_state_dict`, or the state of the unsharded model: each rank takes its parts. Sends
    nothing.

    Args:
        module: the module with the layers.
        state: the whole tensors by name.
        strict: as for `module.load_state_dict`.

    Returns: the result of `module.load_state_dict`.

    Raises:
        ValueError: a tensor's split dimension is not that of the whole parameter.
        RuntimeError: as from `module.load_state_dict`.
    """
    parts = dict(state)
    own = module.state_dict()
    for key, value in own.items():
        if isinstance(value, DTensor) and isinstance(parts.get(key), Tensor) and not isinstance(parts[key], DTensor):
            if parts[key].shape != value.shape:
                raise ValueError(f"load_full_state_dict: expected '{key}' of shape {list(value.shape)}, got "
                                 f"{list(parts[key].shape)}; a shard loads by module.load_state_dict")  # fmt: skip
            whole = parts[key].to(value.device)
            parts[key] = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
    for key, (comm, dim) in _splits(module).items():
        if key not in parts or key not in own:
            continue
        size, whole = comm.get_size(), parts[key]
        shape = list(whole_shape(own[key], size, dim))
        if list(whole.shape) != shape:
            raise ValueError(f"load_full_state_dict: expected '{key}' of shape {shape}, got {list(whole.shape)}; a "
                             "shard loads by module.load_state_dict")  # fmt: skip
        parts[key] = whole.chunk(size, dim)[comm.get_rank()]
    return module.load_state_dict(parts, strict=strict)


def sharded_state_dict(module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns `module.state_dict()` with every split parameter as a DTensor, for torch.distributed.checkpoint.

    A saved checkpoint loads on any number of ranks. The keys are the same, and DTensors share memory with the
    parameters. Sends nothing.

    Args:
        module: the module with the layers.
        mesh: a mesh over the ranks of the layers. For a model that `fully_shard` has split over other dimensions, these
            precede it, as in `mesh["dp", "tp"]`.

    Raises:
        ValueError: the mesh is not that of a layer's communicator, or of `fully_shard`.
    """
    splits = _splits(module)
    return {key: _as_dtensor(key, value, *splits[key], mesh) if key in splits else value
            for key, value in module.state_dict().items()}  # fmt: skip


@torch.no_grad()
def load_sharded_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads the result of `sharded_state_dict` after torch.distributed.checkpoint has filled it. Sends nothing.

    Args:
        module: the module with the layers.
        state: the values by name.
        strict: as for `module.load_state_dict`.

    Returns: the result of `module.load_state_dict`.

    Raises:
        ValueError: a split parameter is not a DTensor, or has another layout.
        RuntimeError: as from `module.load_state_dict`.
    """
    parts, own = dict(state), module.state_dict()
    for key, (comm, dim) in _splits(module).items():
        if key in parts:
            parts[key] = _from_dtensor(key, parts[key], own[key], comm, dim)
    return module.load_state_dict(parts, strict=strict)


def sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the state of an optimizer of `module` as DTensors, like `sharded_state_dict`.

    The names are those of `get_optimizer_state_dict` of torch.distributed.checkpoint.state_dict. The state is complete
    even before the first step. Sends nothing.

    Args:
        module: the module with the layers.
        optimizer: an optimizer of its parameters.
        mesh: as for `sharded_state_dict`.

    Raises:
        ValueError: as `sharded_state_dict`; a state of a split parameter has another shape than the parameter.
    """
    wrap = {of: partial(_as_dtensor, comm=comm, dim=dim, mesh=mesh) for of, (_, comm, dim) in _split(module).items()}
    return _optimizer_state.sharded(module, optimizer, wrap)


@torch.no_grad()
def load_sharded_optimizer_state_dict(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the result of `sharded_optimizer_state_dict` after torch.distributed.checkpoint has filled it.

    Sends nothing.

    Args:
        module: the module with the layers.
        optimizer: an optimizer of its parameters.
        state: the values by name.

    Raises:
        ValueError: the state of a split parameter is not a DTensor, or has another layout.
    """
    unwrap = {of: partial(_from_dtensor, part=part, comm=comm, dim=dim)
              for of, (part, comm, dim) in _split(module).items()}  # fmt: skip
    _optimizer_state.load(module, optimizer, state, unwrap)


def _placements(part: Tensor, size: int, dim: int, ndim: int) -> list[Placement]:
    """Returns the placements of the whole parameter on a mesh of `ndim` dimensions. The last dimension cuts it into
    `size` parts; the preceding ones, those of fully_shard, then cut the part."""
    others = part.placements if isinstance(part, DTensor) else [Replicate()] * (ndim - 1)
    again = [_StridedShard(dim, split_factor=size) if p == Shard(dim) else p for p in others]
    return [*again, Shard(dim)]


def _as_dtensor(key: str, part: Tensor, comm: TorchComm, dim: int, mesh: DeviceMesh) -> DTensor:
    size, (*others, coordinate) = comm.get_size(), mesh.get_coordinate() or [-1]
    if (mesh.size(mesh.ndim - 1), coordinate) != (size, comm.get_rank()):
        raise ValueError(f"sharded_state_dict: expected rank {comm.get_rank()} of {size} in the last dimension of the "
                         f"mesh for '{key}', as in the communicator '{comm.get_name()}', got rank {coordinate} of "
                         f"{mesh.size(mesh.ndim - 1)} in {mesh}")  # fmt: skip
    if isinstance(part, DTensor):
        before = part.device_mesh
        if (before.shape, list(before.get_coordinate() or [])) != (mesh.shape[:-1], others):
            raise ValueError(f"sharded_state_dict: expected a mesh of the dimensions that fully_shard has for '{key}' "
                             f"and then {size} ranks, {(*before.shape, size)}, got {mesh}; write "
                             'mesh["dp", "tp"]')  # fmt: skip
    return from_local(part.to_local() if isinstance(part, DTensor) else part, mesh,
                      _placements(part, size, dim, mesh.ndim), whole_shape(part, size, dim))  # fmt: skip


def _from_dtensor(key: str, value: object, part: Tensor, comm: TorchComm, dim: int) -> Tensor:
    """Returns this rank's part in the form of `part`: a plain tensor, or a DTensor of fully_shard."""
    shape = list(whole_shape(part, comm.get_size(), dim))
    if not isinstance(value, DTensor):
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
        raise ValueError(f"load_sharded_state_dict: expected '{key}' as a DTensor of shape {shape}, got {got}; "
                         "load into what sharded_state_dict gives (whole tensors: load_full_state_dict)")  # fmt: skip
    placements = _placements(part, comm.get_size(), dim, value.device_mesh.ndim)
    if list(value.shape) != shape or list(value.placements) != placements:
        raise ValueError(f"load_sharded_state_dict: expected '{key}' of shape {shape} and {placements}, got "
                         f"{list(value.shape)} and {list(value.placements)}; load into what sharded_state_dict "
                         "of this module gives")  # fmt: skip
    local: Tensor = value.to_local()
    if isinstance(part, DTensor):
        local = DTensor.from_local(local, part.device_mesh, part.placements, run_check=False, shape=part.shape,
                                   stride=part.stride())  # fmt: skip
    return local
