"""axis_index: the coordinate of each rank along an axis.

Shape: [size of the axis], one element per rank. Layout: sharded along the axis. No gradient, no cost.
"""

from __future__ import annotations

import torch

from torch_overlap._C import MeshComms
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.communication.base import axis_names
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, spec_of, with_invariant_rest

__all__ = ["axis_index"]


def _place(mesh: MeshComms, axis_name: str) -> tuple[int, ValueSpec]:
    (axis,) = axis_names("axis_index", mesh.mesh, axis_name)
    layout = with_invariant_rest(Layout(mesh.mesh, [axis]))
    return mesh.coordinate(axis), spec_of(mesh, layout, (mesh.mesh.axis(axis).size,), torch.int32)


def axis_index(mesh: MeshComms, axis_name: str) -> Sharded:
    """Returns an int32 Sharded [size of the axis] of which each rank has one element, its coordinate along the axis.

    `mesh.coordinate(axis)` is the same number as an int on the host.
    """
    place, spec = as_dynamo_constant(_place, mesh, axis_name)
    return Sharded(torch.full((1,), place, dtype=torch.int32, device=spec.device), spec)
