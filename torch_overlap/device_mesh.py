"""DeviceMesh over existing communicators."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap._C import InvalidValueError, TorchComm, _BackendWrapper
from torch_overlap._c10d import BACKEND_NAME

__all__ = ["init_device_mesh"]

# Communicator of each group that was made here.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchComm] = weakref.WeakKeyDictionary()


def init_device_mesh(
    mesh_dim_comms: Sequence[TorchComm],
    mesh_dim_names: Sequence[str],
    _global_comm: TorchComm | None = None,
) -> DeviceMesh:
    """Returns a DeviceMesh whose dimension i communicates through `mesh_dim_comms[i]`, outermost dimension first.

    The ranks of the mesh are those of `_global_comm`, in row-major order: along dimension i, this rank is rank
    `mesh_dim_comms[i].get_rank()`. `_global_comm` is required if there are several dimensions; it becomes
    torch.distributed's default process group, unless that exists and has the same rank and size.

    The process groups are made by `torch.distributed.init_process_group` and `new_group`, of the backend
    "torch_overlap", which gets the given communicators in place of making its own. The description of a dimension's
    group is `mesh_<name>`. `torch.distributed.destroy_process_group()` removes the groups and finalizes the
    communicators. Requires one rank per process: ranks must not be threads.

    Args:
        mesh_dim_comms: one communicator per dimension.
        mesh_dim_names: one name per dimension.
        _global_comm: the communicator of all ranks of the mesh.

    Raises:
        InvalidValueError: names, sizes, devices or ranks do not match. Nothing is registered then.
    """
    comms, names = list(mesh_dim_comms), tuple(mesh_dim_names)
    world = _global_comm if _global_comm is not None or len(comms) != 1 else comms[0]
    _check_arguments(comms, names, world)
    assert world is not None
    sizes = [comm.get_size() for comm in comms]
    mesh = torch.arange(math.prod(sizes), dtype=torch.int).reshape(sizes)
    coordinates = [int(c[0]) for c in torch.nonzero(mesh == world.get_rank(), as_tuple=True)]
    for name, comm, coordinate in zip(names, comms, coordinates, strict=True):
        if comm.get_rank() != coordinate:
            raise InvalidValueError(
                f"init_device_mesh: expected rank {coordinate} in the communicator of '{name}' for rank "
                f"{world.get_rank()} of a mesh of {sizes}, got {comm.get_rank()}; give the outermost dimension first"
            )

    _init_default_group(world)
    groups = []
    for dim, (name, comm) in enumerate(zip(names, comms, strict=True)):
        index: list[int | slice] = list(coordinates)
        index[dim] = slice(None)
        groups.append(_process_group(comm, [int(r) for r in mesh[tuple(index)]], f"mesh_{name}"))
    device_type = comms[0].get_device().type
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=names)


def _check_arguments(comms: list[TorchComm], names: tuple[str, ...], world: TorchComm | None) -> None:
    if not comms or len(comms) != len(names) or len(set(names)) != len(names):
        raise InvalidValueError(
            f"init_device_mesh: expected one name of its own for each communicator, got {len(comms)} communicators "
            f"and names {list(names)}"
        )
    if world is None:
        raise InvalidValueError(
            f"init_device_mesh: expected _global_comm for {len(comms)} dimensions, got None; pass the communicator of "
            "all ranks"
        )
    types = {comm.get_device().type for comm in [world, *comms]}
    if len(types) != 1:
        raise InvalidValueError(f"init_device_mesh: expected communicators of one device type, got {sorted(types)}")
    sizes = [comm.get_size() for comm in comms]
    if math.prod(sizes) != world.get_size():
        raise InvalidValueError(
            f"init_device_mesh: expected dimensions whose product is {world.get_size()}, the size of the global "
            f"communicator, got {sizes}"
        )
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (world.get_rank(), world.get_size()):
        raise InvalidValueError(
            f"init_device_mesh: expected a default process group of rank {world.get_rank()} and size "
            f"{world.get_size()} like the global communicator, got rank {dist.get_rank()} and size "
            f"{dist.get_world_size()}; call destroy_process_group first"
        )


def _init_default_group(world: TorchComm) -> None:
    if dist.is_initialized():
        return
    wrapper = _BackendWrapper(world)
    dist.init_process_group(
        _backend_of(world),
        store=wrapper._store if wrapper._store is not None else HashStore(),
        rank=world.get_rank(),
        world_size=world.get_size(),
        pg_options=wrapper,
        device_id=_gpu_of(world),
    )
    assert dist.group.WORLD is not None
    _keep(dist.group.WORLD, world)


def _process_group(comm: TorchComm, ranks: list[int], description: str) -> dist.ProcessGroup:
    """Returns the process group over `comm`. A second call returns the same one."""
    for group, its_comm in _groups.items():
        if its_comm is comm and _is_registered(group):
            return group
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        backend=_backend_of(comm),
        pg_options=_BackendWrapper(comm),
        use_local_synchronization=True,  # the other ranks make the groups of other rows
        group_desc=description,
        device_id=_gpu_of(comm),
    )
    _keep(made, comm)
    return made


def _keep(group: dist.ProcessGroup, comm: TorchComm) -> None:
    # c10d leaves the type of the default backend undefined if a device is named, and warns of it at destruction.
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    _groups[group] = comm


def _backend_of(comm: TorchComm) -> str:
    """Returns the backend of a group that serves tensors on the communicator's device only."""
    return f"{comm.get_device().type}:{BACKEND_NAME}"


def _gpu_of(comm: TorchComm) -> torch.device | None:
    """Returns the device to which a group is bound, which for c10d is never the CPU."""
    device = comm.get_device()
    return None if device.type == "cpu" else device


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Returns False for a group that was destroyed."""
    try:
        dist.get_group_rank(group, dist.get_rank())
    except ValueError:
        return False
    return True
