"""all_gather, gather_all_axes: make sharded dimensions whole.

Shape: the global one is unchanged. Layout: the axes of the dimension become invariant. Gradient: S -> I, each rank's
part of its own gradient; nothing is sent. Cost: (N-1)/N of the gathered tensor.
"""

from __future__ import annotations

from torch_overlap.mesh.communication.base import LayoutOperation, Move, settled, wrap_dim
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import Spec, with_invariant_rest

__all__ = ["AllGatherOp", "GatherAllAxesOp", "all_gather", "gather_all_axes"]


class AllGatherOp(LayoutOperation):
    """Gathers one dimension; see all_gather."""

    name = "all_gather"

    def move(self, spec: Spec, axis: int) -> Move:
        dim = wrap_dim(self.name, spec, axis, "axis")
        return Move(spec.layout, settled(spec.layout, list(spec.layout.dims[dim])), tuple(spec.shape))


class GatherAllAxesOp(LayoutOperation):
    """Gathers and reduces everything; see gather_all_axes."""

    name = "gather_all_axes"

    def move(self, spec: Spec) -> Move:
        whole = spec.layout.with_partial(None).with_dims([None] * len(spec.shape))
        return Move(spec.layout, with_invariant_rest(whole), tuple(spec.shape))


_all_gather, _gather_all_axes = AllGatherOp(), GatherAllAxesOp()


def all_gather(x: Sharded, axis: int) -> Sharded:
    """Returns `x` with dimension `axis` whole on every rank, gathered over all axes that shard it and no others.

    Other dimensions stay sharded, and partial values stay partial. Negative dimensions count from the end.
    """
    return _all_gather(x, axis)


def gather_all_axes(x: Sharded) -> Sharded:
    """Returns `x` whole on every rank: partial axes are reduced, sharded ones gathered. Invariant along every axis."""
    return _gather_all_axes(x)
