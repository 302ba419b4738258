"""reduce_scatter: sums all ranks' local tensors; each rank keeps its part.

Shape: as for all_reduce. Layout: the axes are appended to those of the dimension. Gradient: all_gather along the same
dimension. Cost: (N-1)/N of a rank's tensor.
"""

from __future__ import annotations

from torch_overlap.mesh.communication.base import (
    Axes,
    Move,
    axis_names,
    check_divisible,
    reduction,
    run_move,
    terms,
    the_only_axis,
    wrap_dim,
)
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec

__all__ = ["reduce_scatter"]


def reduce_scatter_move(spec: ValueSpec, axis: int, axes: Axes = None, reduce_op: str | None = None) -> Move:
    """Returns the definition of reduce_scatter for an operand of this ValueSpec."""
    dim = wrap_dim("reduce_scatter", spec, axis, "axis")
    layout = spec.layout
    names = axis_names("reduce_scatter", spec.mesh.mesh, axes)
    names = names or list(layout.partial) or list(layout.dims[dim]) or the_only_axis("reduce_scatter", spec, "axes")
    source, _, shape = terms("reduce_scatter", spec, names, reduction("reduce_scatter", layout, names, reduce_op))
    check_divisible("reduce_scatter", source.mesh, shape, dim, [*source.dims[dim], *names])
    dims = [list(d) for d in source.dims]
    dims[dim] += names
    partial = {n: k for n, k in source.partial.items() if n not in names}
    return Move(source, source.with_partial(partial).with_dims(dims), shape)


def reduce_scatter(x: Sharded, axis: int, axes: Axes = None, reduce_op: str | None = None) -> Sharded:
    """Reduces all ranks' local tensors over `axes`; each rank keeps its part of dimension `axis`.

    Default for `axes`: the partial ones; if `x` is not partial, the axes of that dimension, whose parts are then the
    terms, or else the only axis of the mesh, whose copies are the terms. `reduce_op` as for all_reduce.

    Raises:
        InvalidValueError: the dimension is not divisible by the number of parts.
    """
    return run_move("reduce_scatter", reduce_scatter_move, x, axis, axes, reduce_op)
