"""all_gather, gather_all_axes: make sharded dimensions whole.

Shape: the global one is unchanged. Layout: the axes of the dimension become invariant. Gradient: S -> I, each rank's
part of its own gradient; nothing is sent. Cost: (N-1)/N of the gathered tensor.
"""

from __future__ import annotations

from torch_overlap.mesh.communication.base import Move, run_move, settled, wrap_dim
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, with_invariant_rest

__all__ = ["all_gather", "gather_all_axes"]


def all_gather_move(spec: ValueSpec, axis: int) -> Move:
    """Returns the definition of all_gather for an operand of this ValueSpec."""
    dim = wrap_dim("all_gather", spec, axis, "axis")
    return Move(spec.layout, settled(spec.layout, list(spec.layout.dims[dim])), tuple(spec.shape))


def gather_all_axes_move(spec: ValueSpec) -> Move:
    """Returns the definition of gather_all_axes for an operand of this ValueSpec."""
    whole = spec.layout.with_partial(None).with_dims([None] * len(spec.shape))
    return Move(spec.layout, with_invariant_rest(whole), tuple(spec.shape))


def all_gather(x: Sharded, axis: int) -> Sharded:
    """Returns `x` with dimension `axis` whole on every rank, gathered over all axes that shard it and no others.

    Other dimensions stay sharded, and partial values stay partial. Negative dimensions count from the end.
    """
    return run_move("all_gather", all_gather_move, x, axis)


def gather_all_axes(x: Sharded) -> Sharded:
    """Returns `x` whole on every rank: partial axes are reduced, sharded ones gathered. Invariant along every axis."""
    return run_move("gather_all_axes", gather_all_axes_move, x)
