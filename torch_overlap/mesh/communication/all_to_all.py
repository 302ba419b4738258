"""all_to_all: moves a sharding from one dimension to another.

Shape: the global one is unchanged. Layout: the axes of `concat_axis` move to the end of the axes of `split_axis`.
Gradient: the reverse exchange. Cost: (N-1)/N of a rank's tensor.
"""

from __future__ import annotations

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Move, check_divisible, run_move, wrap_dim
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, ranks_of

__all__ = ["all_to_all"]


def all_to_all_move(spec: ValueSpec, split_axis: int, concat_axis: int) -> Move:
    """Returns the definition of all_to_all for an operand of this ValueSpec."""
    split = wrap_dim("all_to_all", spec, split_axis, "split_axis")
    concat = wrap_dim("all_to_all", spec, concat_axis, "concat_axis")
    if split == concat:
        raise InvalidValueError(f"all_to_all: expected two dimensions, got split_axis and concat_axis {split}")
    layout = spec.layout
    dims = [list(d) for d in layout.dims]
    dims[split] += dims[concat]
    dims[concat] = []
    check_divisible("all_to_all", layout.mesh, spec.shape, split, dims[split])
    return Move(layout, layout.with_dims(dims), tuple(spec.shape))


def all_to_all(x: Sharded, split_axis: int, concat_axis: int, tiled: bool = True) -> Sharded:
    """Makes the sharded dimension `concat_axis` whole, and shards `split_axis` over the same axes.

    With `tiled=False` the parts of `concat_axis` are stacked instead of concatenated: the dimension becomes two,
    [parts, part].

    Raises:
        InvalidValueError: `split_axis` is not divisible by the number of parts.
    """
    y = run_move("all_to_all", all_to_all_move, x, split_axis, concat_axis)
    if tiled:
        return y
    dim, parts, size = as_dynamo_constant(_stacked, x.spec, concat_axis)
    stacked: Sharded = y.unflatten(dim, (parts, size))
    return stacked


def _stacked(spec: ValueSpec, concat_axis: int) -> tuple[int, int, int]:
    dim = wrap_dim("all_to_all", spec, concat_axis, "concat_axis")
    parts = ranks_of(spec.layout.mesh, spec.layout.dims[dim])
    if spec.shape[dim] % parts:
        raise InvalidValueError(
            f"all_to_all: expected dimension {dim} of {tuple(spec.shape)} divisible by its {parts} parts, to stack "
            f"them, got {spec.shape[dim]}"
        )
    return dim, parts, spec.shape[dim] // parts
