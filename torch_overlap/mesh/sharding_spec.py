"""Notations of a layout: `P("dp", None)`, and `ShardingSpec` with one `DimSpec` per dimension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch_overlap._C import InvalidTypeError
from torch_overlap.mesh._core import Layout, Mesh

__all__ = ["DimSpec", "P", "ShardingSpec", "to_layout"]

Entry = None | str | tuple[str, ...]


def _in_order(op: str, value: Any, what: str) -> tuple[Any, ...]:
    """Returns the items of a sequence. Sets and dicts are refused: their order has no meaning, and may differ between
    ranks."""
    if isinstance(value, (Set, Mapping, bytes)) or not isinstance(value, Iterable):
        raise InvalidTypeError(
            f"{op}: expected {what}, got {type(value).__name__} {value!r}; write axes as a tuple, from major to minor"
        )
    return tuple(value)


def _axes(op: str, value: Any) -> tuple[str, ...]:
    """Returns the axes of one dimension."""
    return (value,) if isinstance(value, str) else _in_order(op, value, "an axis or a sequence of axes a dimension")


class P(tuple[Entry, ...]):
    """One entry per dimension: None, an axis, or a tuple of axes from major to minor.

    Dimensions without an entry are not sharded: `P("dp")` shards the first dimension of any tensor, `P()` is
    replicated.
    """

    def __new__(cls, *entries: Entry | Iterable[str]) -> P:
        return super().__new__(cls, [e if e is None or isinstance(e, str) else _axes("P", e) for e in entries])

    def __getnewargs__(self) -> tuple[Entry, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


@dataclass(frozen=True)
class DimSpec:
    """The axes of one dimension, from major to minor, and its rules for propagation through a graph.

    An open dimension may be sharded further. Priority 0 is the strongest; default: no priority.
    """

    axes: tuple[str, ...] = ()
    is_open: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _axes("DimSpec", self.axes))  # "dp" becomes ("dp",)
        if self.priority < 0:
            raise ValueError(f"DimSpec: expected a priority of at least 0, got {self.priority}")
        if not self.axes and not self.is_open and self.priority != 0:
            raise ValueError(
                f"DimSpec: expected priority 0 for a closed dimension without axes, got {self.priority}; "
                "open it, or leave the priority out"
            )


@dataclass(frozen=True)
class ShardingSpec:
    """A layout with its rules for propagation: the open dimensions, and the axes that must stay replicated."""

    mesh: Mesh
    dim_specs: tuple[DimSpec, ...]
    replicated_axes: frozenset[str] = field(default_factory=frozenset)
    partial_sum_axes: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim_specs", tuple(self.dim_specs))
        object.__setattr__(self, "replicated_axes", frozenset(self.replicated_axes))
        object.__setattr__(self, "partial_sum_axes", frozenset(self.partial_sum_axes))
        # An axis that must stay replicated may appear nowhere else, like an invariant axis.
        Layout(self.mesh, [s.axes for s in self.dim_specs], sorted(self.partial_sum_axes), sorted(self.replicated_axes))

    @property
    def layout(self) -> Layout:
        """The current layout of the tensor."""
        return Layout(self.mesh, [s.axes for s in self.dim_specs], sorted(self.partial_sum_axes))


def to_layout(spec: Any, mesh: Mesh, num_dims: int) -> Layout:
    """Returns the layout of a tensor of `num_dims` dimensions, from any notation.

    Args:
        spec: a Layout, a ShardingSpec, P(...), the text of a layout, a sequence with one entry per dimension, or None.
        mesh: the mesh of the layout.
        num_dims: the number of dimensions.

    Raises:
        InvalidTypeError: neither a layout nor a sequence, for example a set or dict.
        ValueError: more entries than dimensions, another mesh, or an invalid layout.
    """
    if isinstance(spec, ShardingSpec):
        spec = spec.layout
    if isinstance(spec, str):
        spec = Layout.parse(mesh, spec)
    if isinstance(spec, Layout):
        if spec.mesh != mesh:
            raise ValueError(f"to_layout: expected a layout on {mesh}, got one on {spec.mesh}")
        if spec.num_dims != num_dims:
            raise ValueError(f"to_layout: expected a layout of {num_dims} dimensions, got {spec}")
        return spec
    entries = (
        [] if spec is None else list(_in_order("to_layout", spec, "a layout or a sequence with an entry a dimension"))
    )
    if len(entries) > num_dims:
        raise ValueError(f"to_layout: expected at most {num_dims} entries, one a dimension, got {spec!r}")
    entries = [e.axes if isinstance(e, DimSpec) else e for e in entries]
    entries = [_axes("to_layout", e) if isinstance(e, Iterable) else e for e in entries]
    return Layout(mesh, entries + [None] * (num_dims - len(entries)))
