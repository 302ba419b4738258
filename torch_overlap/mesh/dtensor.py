"""Converts to DTensor and back: the same local tensors, with another notation of the layout."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_overlap._C import InvalidValueError, MeshComms, UnsupportedError
from torch_overlap._dtensor import from_local, to_local
from torch_overlap.mesh._core import Layout, Mesh
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import spec_of, with_invariant_rest

__all__ = ["from_dtensor", "layout_from_placements", "mesh_of", "placements_of", "to_dtensor"]

_TO_KIND = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "product"}


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """Returns DTensor's placements for a layout, one for each axis of the mesh in order. Both R and I become Replicate.

    Raises:
        UnsupportedError: a part of an axis, or axes of one dimension in another order than in the mesh.
    """
    names = list(layout.mesh.axes)
    out: list[Placement] = [Replicate() for _ in names]
    for dim, axes in enumerate(layout.dims):
        if any(":" in axis for axis in axes):
            raise UnsupportedError(f"to_dtensor: expected whole axes, got {layout}; reshard it first")
        places = [names.index(axis) for axis in axes]
        if places != sorted(places):
            raise UnsupportedError(
                f"to_dtensor: expected the axes of dimension {dim} in the order of the mesh, {names}, got {layout}; "
                "reshard it first"
            )
        for place in places:
            out[place] = Shard(dim)
    for axis, kind in layout.partial.items():
        if ":" in axis:
            raise UnsupportedError(f"to_dtensor: expected whole axes, got {layout}; reshard it first")
        out[names.index(axis)] = Partial(kind)
    return tuple(out)


def layout_from_placements(mesh: Mesh, placements: Any, num_dims: int) -> Layout:
    """Returns the layout of DTensor's placements, one for each axis of `mesh` in order. Replicate becomes R, not I.

    Raises:
        UnsupportedError: a placement other than Shard, Replicate and Partial.
        InvalidValueError: the number of placements differs from that of the axes.
    """
    names = list(mesh.axes)
    if len(placements) != len(names):
        raise InvalidValueError(
            f"from_dtensor: expected a placement for each axis of {mesh}, got {len(placements)}: {tuple(placements)}"
        )
    dims: list[list[str]] = [[] for _ in range(num_dims)]
    partial: dict[str, str] = {}
    for name, placement in zip(names, placements, strict=True):
        if type(placement) is Shard:
            dims[placement.dim % num_dims].append(name)
        elif type(placement) is Partial and placement.reduce_op in _TO_KIND:
            partial[name] = placement.reduce_op
        elif not isinstance(placement, Replicate):
            raise UnsupportedError(
                f"from_dtensor: expected Shard, Replicate or Partial, got {placement}; redistribute it"
            )
    return Layout(mesh, dims, partial)


def mesh_of(device_mesh: DeviceMesh, ranks_per_host: int = 0) -> Mesh:
    """Returns the Mesh of a DeviceMesh with named dimensions; `connect` it with a communicator of the same ranks."""
    names = device_mesh.mesh_dim_names
    if names is None:
        raise InvalidValueError("mesh_of: expected a DeviceMesh with mesh_dim_names, got one without")
    return Mesh(dict(zip(names, device_mesh.shape, strict=True)), device_mesh.mesh.flatten().tolist(), ranks_per_host)


def to_dtensor(x: Sharded, device_mesh: DeviceMesh) -> DTensor:
    """Returns `x` as a DTensor on a DeviceMesh of the same shape and ranks. Differentiable.

    Replicated and invariant both become Replicate, whose gradient DTensor gives whole to every rank. A value that needs
    a gradient and is partial by another operation than a sum is reduced: DTensor gives each term the whole gradient. A
    gradient of that gradient raises an UnsupportedError for Partial.
    """
    _check(x.mesh, device_mesh)
    if x.requires_grad and set(x.layout.partial.values()) - {"sum"}:
        x = x._reshard(x.layout.with_partial(None))
    # DTensor's gradients are whole everywhere: the move makes those of a replicated value count once.
    x = x._reshard(with_invariant_rest(x.layout))
    return from_local(x.local, device_mesh, placements_of(x.layout), x.shape)


def from_dtensor(x: DTensor, mesh: MeshComms) -> Sharded:
    """Returns a DTensor as a Sharded on a connected mesh of the same shape and ranks. Differentiable.

    Replicate becomes invariant: the gradient that is passed back is whole on every rank, also for Partial. A gradient
    of that gradient raises an UnsupportedError for Partial.
    """
    _check(mesh, x.device_mesh)
    layout = with_invariant_rest(layout_from_placements(mesh.mesh, x.placements, x.dim()))
    return Sharded(to_local(x), spec_of(mesh, layout, x.shape, x.dtype))


def _check(mesh: MeshComms, device_mesh: DeviceMesh) -> None:
    shape, ranks = tuple(mesh.mesh.axes.values()), mesh.mesh.ranks
    if tuple(device_mesh.shape) != shape or device_mesh.mesh.flatten().tolist() != ranks:
        raise InvalidValueError(
            f"dtensor: expected a DeviceMesh of shape {shape} over ranks {ranks}, got {tuple(device_mesh.shape)} over "
            f"{device_mesh.mesh.flatten().tolist()}"
        )
