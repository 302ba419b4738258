"""connect: makes a mesh over the ranks of a communicator, with a communicator for each set of its axes."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch_overlap._C import InvalidValueError, MeshComms, TorchComm, _connect
from torch_overlap.mesh._core import CostModel, Mesh
from torch_overlap.mesh.dynamo import register_constant

__all__ = ["MeshComms", "connect"]


def connect(
    mesh: Mesh | Mapping[str, int] | str,
    comm: TorchComm,
    *,
    name: str = "mesh",
    cost: CostModel | None = None,
    sets: Sequence[str] | None = None,
) -> MeshComms:
    """Makes the communicators of a mesh. Collective over `comm`, whose ranks are those of the mesh.

        mesh = connect({"dp": 2, "tp": 4}, comm)
        w = shard(torch.empty(4096, 4096), mesh, P(None, "tp"))

    Args:
        mesh: a Mesh, sizes by axis name, or text.
        comm: the communicator of all ranks.
        name: unique in the process; the prefix of the communicators' names.
        cost: the cost model of the planner, equal on all ranks. Default: H200s.
        sets: the sets of axes that get a communicator ("dp", "dp,tp"). Default: all sets of a mesh of up to three axes;
            for a larger one each axis, and all axes together. All ranks split off another set when it is first used. In
            a CUDA graph capture, or on the fake tensors of a compiler, that is an error: name the set here, or call
            `prepare`.

    Raises:
        InvalidValueError: a mesh of other ranks; a name that a live mesh has.
    """
    if isinstance(mesh, str):
        mesh = Mesh.parse(mesh)
    elif not isinstance(mesh, Mesh):
        mesh = Mesh(mesh)
    try:
        made = _connect(mesh, comm, name, cost or CostModel.h200(), sets)
    except InvalidValueError as error:
        if "that no live mesh has" not in str(error):
            raise
        gc.collect()  # a dropped mesh may still be in a reference cycle, and hold its name
        made = _connect(mesh, comm, name, cost or CostModel.h200(), sets)
    made._specs, made._recipes, made._parts, made.constant_name = {}, {}, {}, register_constant(made)
    return made


def mesh_without(mesh: MeshComms, axes: Sequence[str]) -> MeshComms:
    """Returns the mesh of the other axes, over the ranks with this one's coordinates along `axes`. Closed with `mesh`.

    The first call makes it, which is collective over all ranks.
    """
    mesh.prepare()  # raises if the mesh was closed, and the parts with it
    key = tuple(sorted(axes))
    if key not in mesh._parts:
        part = _make_part(mesh, key)
        mesh._add_part(part)
        mesh._parts[key] = part
    return mesh._parts[key]


def _make_part(mesh: MeshComms, axes: Sequence[str]) -> MeshComms:
    whole = mesh.mesh
    rest = {name: size for name, size in whole.axes.items() if name not in axes}
    places = ",".join(f"{name}={mesh.coordinate(name)}" for name in axes)
    mesh.prepare(list(rest))
    comm = mesh.group_comm(list(rest)) or mesh.comm.split([mesh.rank], f"{mesh.name}/{places}/{mesh.rank}")
    assert comm is not None
    links = {name: next(iter(whole.links(name))) for name, size in rest.items() if size > 1}
    return connect(Mesh(rest or {"none": 1}, links=links), comm, name=f"{mesh.name}/{places}", cost=mesh.cost)
