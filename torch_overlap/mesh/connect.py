"""connect: a mesh of the ranks of a communicator, with a communicator for each set of its axes."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch_overlap._C import InvalidValueError, MeshComms, TorchComm, _connect
from torch_overlap.mesh._core import CostModel, Mesh
from torch_overlap.mesh.tracing import name_it

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

    `sets`: the sets of axes that get a communicator ("dp", "dp,tp"). Without it: all sets of a mesh of up to three
    axes; of a larger one each axis, and all together. Another set is split off when it is first used, by all ranks;
    in a CUDA graph capture, or on the fake tensors of a compiler, that is an error: name it here, or call `prepare`.

    `cost`: what plans are made with, the same on all ranks; of H200s unless given. `name`: of its own in the process,
    the beginning of the communicators' names.

    Errors: a mesh of other ranks; a name that a live mesh has.
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
        gc.collect()  # one that was dropped may be in a cycle still, and hold its name
        made = _connect(mesh, comm, name, cost or CostModel.h200(), sets)
    made._specs, made._recipes, made._parts, made.traced_name = {}, {}, {}, name_it(made)
    return made


def mesh_without(mesh: MeshComms, axes: Sequence[str]) -> MeshComms:
    """The mesh of the other axes, of the ranks that are where this one is along `axes`. Closed with `mesh`.

    Made at the first call, which is collective over all ranks.
    """
    key = tuple(sorted(axes))
    if key not in mesh._parts:
        mesh._parts[key] = _make_part(mesh, key)
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


_close = MeshComms.close


def _close_with_parts(self: MeshComms) -> None:
    """Finalizes the communicators that were made here, not the given one. Collective."""
    for part in self._parts.values():
        part.close()
        if part.mesh.size == 1 and not part.comm.is_finalized():
            part.comm.finalize()
    self._parts.clear()
    _close(self)


MeshComms.close = _close_with_parts  # type: ignore[method-assign]
