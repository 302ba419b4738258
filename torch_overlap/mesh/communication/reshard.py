"""reshard, assume_partial: from any layout to any other, and the cast that calls copies terms.

Shape: the global one stays. Layout: the one that is asked for. Gradient: that of the plan's steps. Cost: the plan's.
"""

from __future__ import annotations

from typing import Any

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Axes, LayoutOperation, Move, axis_names
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import Spec, layout_of, used_axes

__all__ = ["AssumePartialOp", "ReshardOp", "assume_partial", "reshard"]


class ReshardOp(LayoutOperation):
    """Any layout to any other; see reshard."""

    name = "reshard"

    def move(self, spec: Spec, to: Any) -> Move:
        return Move(spec.layout, layout_of(to, spec.mesh, len(spec.shape)), tuple(spec.shape))


class AssumePartialOp(LayoutOperation):
    """Copies as terms; see assume_partial."""

    name = "assume_partial"

    def move(self, spec: Spec, axes: Axes, reduce_op: str = "sum") -> Move:
        names = axis_names(self.name, spec.mesh.mesh, axes)
        layout = spec.layout
        taken = sorted(used_axes(layout) & set(names))
        if taken:
            raise InvalidValueError(
                f"{self.name}: expected axes along which the value is whole, got {taken} of {layout}"
            )
        partial = {**layout.partial, **dict.fromkeys(names, reduce_op)}
        left = layout.with_invariant([n for n in layout.invariant if n not in names]).with_partial(partial)
        return Move(left, left, tuple(spec.shape))


_reshard, _assume_partial = ReshardOp(), AssumePartialOp()


def reshard(x: Sharded, spec: Any) -> Sharded:
    """`x` in another layout, by the cheapest plan: any spelling of one, where what P or None leave out is invariant.

    Uneven parts are cut as torch.chunk does.
    """
    return _reshard(x, spec)


def assume_partial(x: Sharded, axes: Axes, reduce_op: str = "sum") -> Sharded:
    """The same local tensors, taken as the terms of a reduction over `axes`, along which `x` was whole until now.

    The value changes: of a sum over N ranks it is N times what it was, and so is its gradient: each of the terms has
    that of the sum. Nothing is sent; of an invariant value gradients are summed, which is an all_reduce.
    """
    return _assume_partial(x, axes, reduce_op)
