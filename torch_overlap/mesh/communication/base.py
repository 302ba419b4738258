"""Common parts of the communication functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch_overlap._C import InvalidTypeError, InvalidValueError
from torch_overlap.mesh._core import Layout, Mesh
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, ranks_of, spec_of

__all__ = [
    "Axes",
    "Move",
    "axis_names",
    "check_divisible",
    "in_mesh_order",
    "reduction",
    "run_move",
    "settled",
    "sharded_spec",
    "terms",
    "the_only_axis",
    "wrap_dim",
]

Axes = None | str | Iterable[str]


class Move(NamedTuple):
    """The definition of an operation: local tensors, as parts under `source`, are resharded to `target`.

    For an operation that only moves data, `source` is the layout of its operand. For one that reduces, each rank's
    tensor is a term.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]


def sharded_spec(op: str, x: Any) -> ValueSpec:
    """Returns the ValueSpec of a Sharded. Raises InvalidTypeError for anything else."""
    if not isinstance(x, Sharded):
        raise InvalidTypeError(f"{op}: expected a Sharded, got {type(x).__name__}; shard(x, mesh, spec) makes one")
    return x.spec


def run_move(op: str, move: Callable[..., Move], x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    """Runs the operation that `move(spec, *args, **kwargs)` defines on `x`.

    The gradient is that of the plan's steps, by the state of each axis (R, I, S, P): a value that becomes invariant has
    a gradient that is whole on every rank.
    """
    before, taken, target = as_dynamo_constant(_ends, move, sharded_spec(op, x), args, kwargs)
    return (x if taken is None else Sharded(x._move_to(before).local, taken))._move_to(target)


def _ends(
    move: Callable[..., Move], spec: ValueSpec, args: Any, kwargs: Any
) -> tuple[ValueSpec, ValueSpec | None, ValueSpec]:
    """Returns three ValueSpecs: the one that the operand is brought to first, the one that it is then reinterpreted as
    (None if unchanged), and that of the result.

    If N copies become N terms, the gradient is the sum of the terms': that of a replicated value.
    """
    source, target, shape = move(spec, *args, **kwargs)
    whole = spec.layout.with_invariant([n for n in spec.layout.invariant if n not in source.partial])
    taken = None if source == spec.layout else spec_of(spec.mesh, source, shape, spec.dtype)
    before = spec_of(spec.mesh, whole, spec.shape, spec.dtype)
    return before, taken, spec_of(spec.mesh, target, shape, spec.dtype)


KINDS = {"sum": "sum", "avg": "avg", "mean": "avg", "max": "max", "min": "min", "prod": "product", "product": "product"}


def reduction(op: str, layout: Layout, axes: Sequence[str], reduce_op: str | None) -> str:
    """Returns the reduction over `axes` that `reduce_op` names. None means the kind of the partial axes, else a sum."""
    if reduce_op is not None:
        if reduce_op not in KINDS:
            raise InvalidValueError(f"{op}: expected a reduce_op of {sorted(KINDS)}, got {reduce_op!r}")
        return KINDS[reduce_op]
    kinds = {layout.partial.get(axis, "sum") for axis in axes} or {"sum"}
    if len(kinds) > 1:
        raise InvalidValueError(f"{op}: expected one reduction for {list(axes)}, got {sorted(kinds)}")
    return kinds.pop()


def check_divisible(op: str, mesh: Mesh, shape: Sequence[int], dim: int, axes: Sequence[str]) -> None:
    """Raises InvalidValueError unless these axes divide the dimension into parts of the same size."""
    parts = ranks_of(mesh, axes)
    if shape[dim] % parts:
        raise InvalidValueError(
            f"{op}: expected dimension {dim} of {tuple(shape)} divisible by the {parts} ranks of {list(axes)}, got "
            f"{shape[dim]}; reshard it where parts may differ"
        )


def in_mesh_order(mesh: Mesh, names: Iterable[str]) -> list[str]:
    return sorted(names, key=list(mesh.axes).index)


def axis_names(op: str, mesh: Mesh, axes: Axes) -> list[str]:
    """Returns the names of axes. Raises unless the mesh has each of them and each is named once."""
    names = [axes] if isinstance(axes, str) else list(axes or [])
    for name in names:
        mesh.axis(name)
    if len(set(names)) != len(names):
        raise InvalidValueError(f"{op}: expected each axis once, got {names}")
    return names


def wrap_dim(op: str, spec: ValueSpec, dim: int, what: str) -> int:
    """Returns `dim` counted from the front."""
    count = len(spec.shape)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise InvalidTypeError(f"{op}: expected an int as {what}, got {type(dim).__name__}")
    if not -count <= dim < count:
        raise InvalidValueError(f"{op}: expected {what} in [{-count}, {count - 1}] for {tuple(spec.shape)}, got {dim}")
    return dim % count


def the_only_axis(op: str, spec: ValueSpec, what: str) -> list[str]:
    """Returns the axis of a mesh with only one; otherwise raises, since the caller must name it."""
    names = [name for name, size in spec.mesh.mesh.axes.items() if size > 1] or list(spec.mesh.mesh.axes)
    if len(names) != 1:
        raise InvalidValueError(
            f"{op}: expected {what} on {spec.mesh.mesh}, where {spec.text} leaves it open, got None"
        )
    return names[:1]


def terms(op: str, spec: ValueSpec, axes: Sequence[str], kind: str) -> Move:
    """Returns the local tensors as terms of a reduction over `axes`. If an axis shards a dimension, that dimension gets
    the size of the parts, which must be equal. The target is left equal to the source."""
    layout, shape = spec.layout, list(spec.shape)
    dims = [list(d) for d in layout.dims]
    for dim, names in enumerate(dims):
        gone = [n for n in names if n in axes]
        if not gone:
            continue
        if names[len(names) - len(gone) :] != gone:
            raise InvalidValueError(
                f"{op}: expected {gone} to be the last axes of dimension {dim}, got {tuple(names)} in {layout}"
            )
        before, parts = ranks_of(layout.mesh, names), ranks_of(layout.mesh, gone)
        if shape[dim] % before:
            raise InvalidValueError(
                f"{op}: expected parts of equal size to reduce, dimension {dim} divisible by {before}, got {shape[dim]}"
            )
        shape[dim] //= parts
        dims[dim] = names[: len(names) - len(gone)]
    partial = {**layout.partial, **dict.fromkeys(axes, kind)}
    for name in axes:
        if layout.partial.get(name, kind) != kind:
            raise InvalidValueError(
                f"{op}: expected '{kind}' for {name}, whose value is partial as '{layout.partial[name]}', got another; "
                "reduce it that way first"
            )
    source = Layout(layout.mesh, dims, partial, [n for n in layout.invariant if n not in axes])
    return Move(source, source, tuple(shape))


def settled(layout: Layout, axes: Sequence[str]) -> Layout:
    """Returns the layout with these axes, which were partial or sharded a dimension, made invariant."""
    dims = [[n for n in names if n not in axes] for names in layout.dims]
    partial = {n: kind for n, kind in layout.partial.items() if n not in axes}
    return Layout(layout.mesh, dims, partial, [*layout.invariant, *(n for n in axes if n not in layout.invariant)])
