"""ValueSpec: the metadata of a Sharded; and the meaning of layouts for values and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from torch_overlap._C import InvalidTypeError, MeshComms
from torch_overlap.mesh._core import Layout, Mesh
from torch_overlap.mesh.dynamo import DynamoConstant
from torch_overlap.mesh.sharding_spec import to_layout

__all__ = [
    "ValueSpec",
    "expect_connected",
    "gradient_layout",
    "gradient_of",
    "layout_of",
    "ranks_of",
    "replicated_spec",
    "spec_of",
    "target_of",
    "used_axes",
    "with_invariant_rest",
]

MAX_SPECS = 1 << 16


class ValueSpec(DynamoConstant):
    """The metadata of a Sharded. Equal ones are one object, compared by identity.

    Attributes:
        mesh, layout, shape (global), dtype.
        text, name: The layout as text, and the name of the mesh, as arguments of operators.
        values: The layout as text without the invariant axes, which only gradients depend on.
        is_reduced: True if the value is not partial.
        anchored: True if operators move other operands instead of this one.
        device: The device of the mesh.
        recipes: The recipes of functions on this mesh; see dispatch.
        targets, gradient: Cached results of target_of and gradient_of.
    """

    __slots__ = (
        "anchored",
        "device",
        "dtype",
        "gradient",
        "is_reduced",
        "layout",
        "mesh",
        "name",
        "recipes",
        "shape",
        "targets",
        "text",
        "values",
    )

    def __init__(
        self, mesh: MeshComms, layout: Layout, shape: torch.Size, dtype: torch.dtype, anchored: bool = False
    ) -> None:
        super().__init__()
        self.mesh, self.layout, self.shape, self.dtype, self.anchored = mesh, layout, shape, dtype, anchored
        self.text, self.values = str(layout), str(layout.with_invariant(None))
        self.name, self.device = mesh.name, mesh.comm.get_device()
        self.recipes: dict[Any, Any] = mesh._recipes
        self.is_reduced = not layout.partial
        self.targets: dict[Any, ValueSpec] = {}
        self.gradient: ValueSpec | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ValueSpec:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"pickle: expected what does not lie on a mesh of this process, got a value {self.text} on '{self.name}'; "
            "save full_state_dict(module), value.full(), or value.local and str(value.layout)"
        )

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} {self.text} on {self.mesh.mesh}"

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, self.mesh.rank)

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """Returns the largest local shape: that of the first rank of the mesh, and the same answer on every rank."""
        return self.layout.local_shape(self.shape, self.mesh.mesh.ranks[0])


def spec_of(
    mesh: MeshComms, layout: Layout, shape: Sequence[int], dtype: torch.dtype, anchored: bool = False
) -> ValueSpec:
    """Returns the ValueSpec of these values: the same object for equal ones."""
    size = torch.Size(shape)
    key = (layout, size, dtype, anchored)
    spec: ValueSpec | None = mesh._specs.get(key)
    if spec is None:
        if len(mesh._specs) >= MAX_SPECS:  # ValueSpecs in use stay alive
            mesh._specs.clear()
            mesh._recipes.clear()
        spec = mesh._specs[key] = ValueSpec(mesh, layout, size, dtype, anchored)
    return spec


def replicated_spec(mesh: MeshComms, shape: Sequence[int], dtype: torch.dtype) -> ValueSpec:
    """Returns the ValueSpec of a value that every rank has whole, and whose gradient every rank has whole."""
    return spec_of(mesh, with_invariant_rest(Layout.replicated(mesh.mesh, len(shape))), shape, dtype)


def target_of(spec: ValueSpec, to: Any) -> ValueSpec:
    """Returns the ValueSpec of the same value in another layout: any spelling of one."""
    try:
        found = spec.targets.get(to)
    except TypeError:  # a spelling with lists, which have no hash
        return _target_of(spec, to)
    if found is None:
        found = spec.targets[to] = _target_of(spec, to)
    return found


def _target_of(spec: ValueSpec, to: Any) -> ValueSpec:
    return spec_of(spec.mesh, layout_of(to, spec.mesh, len(spec.shape)), spec.shape, spec.dtype)


def gradient_of(spec: ValueSpec) -> ValueSpec:
    """Returns the ValueSpec of the gradient of a value."""
    if spec.gradient is None:
        spec.gradient = spec_of(spec.mesh, gradient_layout(spec.layout), spec.shape, spec.dtype)
    return spec.gradient


def expect_connected(who: str, mesh: object) -> None:
    """Raises InvalidTypeError for a mesh that cannot communicate: a planner's Mesh, a DeviceMesh, a name."""
    if not isinstance(mesh, MeshComms):
        raise InvalidTypeError(
            f"{who}: expected a mesh with communicators, got {mesh!r} ({type(mesh).__name__}); "
            "connect(mesh, comm) makes one"
        )


def layout_of(spec: Any, mesh: MeshComms, num_dims: int) -> Layout:
    """Returns a layout from any notation. Axes that P, a ShardingSpec or entries omit are invariant: the same value on
    all ranks, and the same gradient. A Layout, or its text, is used unchanged."""
    layout = to_layout(spec, mesh.mesh, num_dims)
    if isinstance(spec, Layout | str):
        return layout
    return with_invariant_rest(layout)


def with_invariant_rest(layout: Layout) -> Layout:
    """Returns the layout with every unused axis made invariant, and the rest of every partly used axis."""
    plain = layout.with_invariant(None)
    return plain.with_invariant(unused_axes(plain))


def unused_axes(layout: Layout) -> list[str]:
    """Returns the unused axes, along which local tensors are replicated. For a partly used axis, the rest of it."""
    mesh = layout.mesh
    names = [*(name for dim in layout.dims for name in dim), *layout.partial, *layout.invariant]
    unused = []
    for axis, size in mesh.axes.items():
        done = 1  # parts of an axis follow each other: x:(1)2, x:(2)4
        for ref in sorted((mesh.axis(n) for n in names if n.split(":")[0] == axis), key=lambda ref: ref.pre):
            if ref.pre > done:
                unused.append(f"{axis}:({done}){ref.pre // done}")
            done = ref.pre * ref.size
        if done < size or axis not in {n.split(":")[0] for n in names}:
            unused.append(axis if done == 1 else f"{axis}:({done}){size // done}")
    return unused


def ranks_of(mesh: Mesh, axes: Iterable[str]) -> int:
    """Returns the number of ranks along these axes, or parts of axes."""
    return math.prod(mesh.axis(axis).size for axis in axes)


def used_axes(layout: Layout) -> set[str]:
    """Returns the axes along which local tensors differ: sharded or partial."""
    names = {name for dim in layout.dims for name in dim} | set(layout.partial)
    return {name.split(":")[0] for name in names}


def gradient_layout(layout: Layout) -> Layout:
    """Returns the layout of the gradient of a value: partial where the value is replicated, and vice versa; sharded and
    invariant as the value is."""
    return layout.with_partial(unused_axes(layout))
