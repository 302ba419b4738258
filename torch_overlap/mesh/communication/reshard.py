"""reshard, assume_partial: convert between any two layouts, and reinterpret copies as terms.

Shape: the global one is unchanged. Layout: the requested one. Gradient: that of the plan's steps. Cost: the plan's.
"""

from __future__ import annotations

from typing import Any

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Axes, Move, axis_names, run_move
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, layout_of, used_axes

__all__ = ["assume_partial", "reshard"]


def reshard_move(spec: ValueSpec, to: Any) -> Move:
    """Returns the definition of reshard for an operand of this ValueSpec."""
    return Move(spec.layout, layout_of(to, spec.mesh, len(spec.shape)), tuple(spec.shape))


def assume_partial_move(spec: ValueSpec, axes: Axes, reduce_op: str = "sum") -> Move:
    """Returns the definition of assume_partial for an operand of this ValueSpec."""
    names = axis_names("assume_partial", spec.mesh.mesh, axes)
    layout = spec.layout
    taken = sorted(used_axes(layout) & set(names))
    if taken:
        raise InvalidValueError(
            f"assume_partial: expected axes along which the value is whole, got {taken} of {layout}"
        )
    partial = {**layout.partial, **dict.fromkeys(names, reduce_op)}
    left = layout.with_invariant([n for n in layout.invariant if n not in names]).with_partial(partial)
    return Move(left, left, tuple(spec.shape))


def reshard(x: Sharded, spec: Any) -> Sharded:
    """Returns `x` in another layout, by the cheapest plan. Accepts any spelling of a layout; axes omitted by P or None
    are invariant.

    Uneven parts are cut as in torch.chunk.
    """
    return run_move("reshard", reshard_move, x, spec)


def assume_partial(x: Sharded, axes: Axes, reduce_op: str = "sum") -> Sharded:
    """Reinterprets the local tensors as terms of a reduction over `axes`, along which `x` was whole.

    The value changes: a sum over N ranks is N times the previous value, and so is its gradient, since each term has the
    gradient of the sum. Nothing is sent forward; the gradients of an invariant value are summed by an all_reduce.
    """
    return run_move("assume_partial", assume_partial_move, x, axes, reduce_op)
