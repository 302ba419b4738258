"""all_reduce, pmean: the reduction of all ranks' local tensors along some axes, on each of them.

Shape: that of the local tensors; a dimension that was sharded along a reduced axis shrinks to one part.
Layout: the axes become invariant. Gradient: P -> I, the gradient of every term is that of the result (of a value whose
copies are the terms, the sum of theirs); not for max, min and product, which raise when one is asked. Cost: 2(N-1)/N of
the tensor.
"""

from __future__ import annotations

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import (
    Axes,
    LayoutOperation,
    Move,
    axis_names,
    reduction,
    settled,
    terms,
    the_only_axis,
)
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import Spec

__all__ = ["AllReduceOp", "PMeanOp", "all_reduce", "pmean"]


class AllReduceOp(LayoutOperation):
    """Reduces over `reduce_axes`; see all_reduce."""

    name = "all_reduce"

    def move(self, spec: Spec, reduce_op: str | None = None, reduce_axes: Axes = None) -> Move:
        if reduce_axes is not None:
            axes = axis_names(self.name, spec.mesh.mesh, reduce_axes)
        else:
            axes = list(spec.layout.partial) or the_only_axis(self.name, spec, "reduce_axes")
            if reduce_op is None and spec.layout.partial:  # each axis as it is pending
                return Move(spec.layout, settled(spec.layout, axes), tuple(spec.shape))
        source, _, shape = terms(self.name, spec, axes, reduction(self.name, spec.layout, axes, reduce_op))
        return Move(source, settled(source, axes), shape)


class PMeanOp(LayoutOperation):
    """The mean over an axis; see pmean."""

    name = "pmean"

    def move(self, spec: Spec, axis_name: Axes = None) -> Move:
        pending = [name for name, kind in spec.layout.partial.items() if kind not in ("sum", "avg")]
        if pending:
            raise InvalidValueError(
                f"pmean: expected a value that is no pending reduction over {pending}, got {spec.text}"
            )
        axes = axis_names(self.name, spec.mesh.mesh, axis_name) or the_only_axis(self.name, spec, "axis_name")
        layout = spec.layout.with_partial({n: k for n, k in spec.layout.partial.items() if n not in axes})
        plain = Spec(spec.mesh, layout, spec.shape, spec.dtype)
        source, _, shape = terms(self.name, plain, axes, "avg")
        return Move(source, settled(source, axes), shape)


_all_reduce, _pmean = AllReduceOp(), PMeanOp()


def all_reduce(x: Sharded, reduce_op: str | None = None, reduce_axes: Axes = None) -> Sharded:
    """The reduction of all ranks' local tensors over `reduce_axes`, on each of them.

    Without `reduce_axes`: what is pending, each axis as it is; of a value that is not, the one axis of the mesh. Named
    axes are reduced whatever lies along them: along an axis that shards a dimension, the parts are the terms (they must
    be of one size, and the dimension becomes as large as one), along one where the value is whole each rank's copy is.

    Args:
        reduce_op: "sum", "avg" (or "mean"), "max", "min", "product" (or "prod"); None: as pending, else a sum.

    Returns: invariant along `reduce_axes`: the gradient is whole on every rank, and that of each term is the same.

    Raises:
        InvalidValueError: an unknown reduction or axis, parts of several sizes.
    """
    return _all_reduce(x, reduce_op, reduce_axes)


def pmean(x: Sharded, axis_name: Axes = None) -> Sharded:
    """The mean of all ranks' local tensors along an axis (the one of the mesh unless given), on each of them.

    Of a value that is the same along the axis: that value. Gradient: of each rank's tensor 1/N of the result's.
    """
    return _pmean(x, axis_name)
