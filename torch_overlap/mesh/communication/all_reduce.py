"""all_reduce, pmean: reduce all ranks' local tensors along some axes, with the result on each of them.

Shape: that of the local tensors; a dimension that was sharded along a reduced axis shrinks to one part.
Layout: the axes become invariant. Gradient: P -> I, the gradient of every term is that of the result (if the terms are
the copies of one value, it is the sum of theirs); max, min and product raise if a gradient is requested. Cost:
2(N-1)/N of the tensor.
"""

from __future__ import annotations

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import (
    Axes,
    Move,
    axis_names,
    reduction,
    run_move,
    settled,
    terms,
    the_only_axis,
)
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec

__all__ = ["all_reduce", "pmean"]


def all_reduce_move(spec: ValueSpec, reduce_op: str | None = None, reduce_axes: Axes = None) -> Move:
    """Returns the definition of all_reduce for an operand of this ValueSpec."""
    if reduce_axes is not None:
        axes = axis_names("all_reduce", spec.mesh.mesh, reduce_axes)
    else:
        axes = list(spec.layout.partial) or the_only_axis("all_reduce", spec, "reduce_axes")
        if reduce_op is None and spec.layout.partial:  # each axis by its own partial kind
            return Move(spec.layout, settled(spec.layout, axes), tuple(spec.shape))
    source, _, shape = terms("all_reduce", spec, axes, reduction("all_reduce", spec.layout, axes, reduce_op))
    return Move(source, settled(source, axes), shape)


def pmean_move(spec: ValueSpec, axis_name: Axes = None) -> Move:
    """Returns the definition of pmean for an operand of this ValueSpec."""
    pending = [name for name, kind in spec.layout.partial.items() if kind not in ("sum", "avg")]
    if pending:
        raise InvalidValueError(f"pmean: expected a value that is not partial over {pending}, got {spec.text}")
    axes = axis_names("pmean", spec.mesh.mesh, axis_name) or the_only_axis("pmean", spec, "axis_name")
    layout = spec.layout.with_partial({n: k for n, k in spec.layout.partial.items() if n not in axes})
    plain = ValueSpec(spec.mesh, layout, spec.shape, spec.dtype)
    source, _, shape = terms("pmean", plain, axes, "avg")
    return Move(source, settled(source, axes), shape)


def all_reduce(x: Sharded, reduce_op: str | None = None, reduce_axes: Axes = None) -> Sharded:
    """Reduces all ranks' local tensors over `reduce_axes`; each of them gets the result.

    Along an axis that shards a dimension, the parts are the terms: they must have the same size, and the dimension
    becomes as large as one part. Along an axis where the value is whole, each rank's copy is a term.

    Args:
        x: the value.
        reduce_op: "sum", "avg" (or "mean"), "max", "min", "product" (or "prod"). Default: the kind of the partial axes,
            else a sum.
        reduce_axes: the axes. Default: the partial ones, each reduced by its own kind; if `x` is not partial, the only
            axis of the mesh.

    Returns: invariant along `reduce_axes`: the gradient is whole on every rank, and that of each term is the same.

    Raises:
        InvalidValueError: an unknown reduction or axis, or parts of different sizes.
    """
    return run_move("all_reduce", all_reduce_move, x, reduce_op, reduce_axes)


def pmean(x: Sharded, axis_name: Axes = None) -> Sharded:
    """Returns the mean of all ranks' local tensors along an axis (default: the only axis of the mesh), on each of them.

    The mean of a value that is the same along the axis is that value. Gradient: each rank's tensor gets 1/N of the
    result's.
    """
    return run_move("pmean", pmean_move, x, axis_name)
