"""Spec: what a Sharded is, apart from its numbers; and what layouts mean for values and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from torch_overlap._C import InvalidTypeError, MeshComms
from torch_overlap.mesh._core import Layout, Mesh
from torch_overlap.mesh.spec import to_layout
from torch_overlap.mesh.tracing import Named

__all__ = [
    "Spec",
    "expect_connected",
    "gradient_layout",
    "gradient_of",
    "layout_of",
    "ranks_of",
    "spec_of",
    "target_of",
    "used_axes",
    "whole_of",
    "with_invariant_rest",
]

MOST_SPECS = 1 << 16


class Spec(Named):
    """What a Sharded is, apart from its numbers. One object for equal ones: compared by identity.

    Attributes:
        mesh, layout, shape (global), dtype.
        text, name: The layout in words, and the name of the mesh, as operators take them.
        values: The layout in words without what is invariant, which only gradients depend on.
        is_whole: Is the value not pending?
        anchored: Operators bring other operands to this one.
        device: That of the mesh.
        recipes: How functions run on this mesh; see dispatch.
        targets, gradient: What target_of and gradient_of found.
    """

    __slots__ = (
        "anchored",
        "device",
        "dtype",
        "gradient",
        "is_whole",
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
        self.is_whole = not layout.partial
        self.targets: dict[Any, Spec] = {}
        self.gradient: Spec | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
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
        """The largest local shape: that of the first rank of the mesh, and the same answer on every rank."""
        return self.layout.local_shape(self.shape, self.mesh.mesh.ranks[0])


def spec_of(mesh: MeshComms, layout: Layout, shape: Sequence[int], dtype: torch.dtype, anchored: bool = False) -> Spec:
    """The Spec of these: the same object for the same ones."""
    size = torch.Size(shape)
    key = (layout, size, dtype, anchored)
    spec: Spec | None = mesh._specs.get(key)
    if spec is None:
        if len(mesh._specs) >= MOST_SPECS:  # those in use live on
            mesh._specs.clear()
            mesh._recipes.clear()
        spec = mesh._specs[key] = Spec(mesh, layout, size, dtype, anchored)
    return spec


def whole_of(mesh: MeshComms, shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """The Spec of a value that every rank has, and knows the whole gradient of."""
    return spec_of(mesh, with_invariant_rest(Layout.replicated(mesh.mesh, len(shape))), shape, dtype)


def target_of(spec: Spec, to: Any) -> Spec:
    """The Spec of the same value in another layout: any spelling of one."""
    try:
        found = spec.targets.get(to)
    except TypeError:  # a spelling with lists, which have no hash
        return _target_of(spec, to)
    if found is None:
        found = spec.targets[to] = _target_of(spec, to)
    return found


def _target_of(spec: Spec, to: Any) -> Spec:
    return spec_of(spec.mesh, layout_of(to, spec.mesh, len(spec.shape)), spec.shape, spec.dtype)


def gradient_of(spec: Spec) -> Spec:
    """The Spec of the gradient of a value."""
    if spec.gradient is None:
        spec.gradient = spec_of(spec.mesh, gradient_layout(spec.layout), spec.shape, spec.dtype)
    return spec.gradient


def expect_connected(who: str, mesh: object) -> None:
    """Refuses what cannot communicate: a planner's Mesh, a DeviceMesh, a name."""
    if not isinstance(mesh, MeshComms):
        raise InvalidTypeError(
            f"{who}: expected a mesh with communicators, got {mesh!r} ({type(mesh).__name__}); "
            "connect(mesh, comm) makes one"
        )


def layout_of(spec: Any, mesh: MeshComms, num_dims: int) -> Layout:
    """A layout from any way to write one. What P, a ShardingSpec or entries leave out is invariant: the same value on
    all ranks, and the same gradient. A Layout, or its text, is taken as it is."""
    layout = to_layout(spec, mesh.mesh, num_dims)
    if isinstance(spec, Layout | str):
        return layout
    return with_invariant_rest(layout)


def with_invariant_rest(layout: Layout) -> Layout:
    """The layout with every axis that it does not use made invariant, and the rest of one that it uses in part."""
    plain = layout.with_invariant(None)
    return plain.with_invariant(unused_axes(plain))


def unused_axes(layout: Layout) -> list[str]:
    """The axes along which nothing is said: local tensors are replicated. Of an axis that is used in part, the rest."""
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
    """How many ranks these axes, or parts of axes, join."""
    return math.prod(mesh.axis(axis).size for axis in axes)


def used_axes(layout: Layout) -> set[str]:
    """The axes along which local tensors differ: sharded, or pending."""
    names = {name for dim in layout.dims for name in dim} | set(layout.partial)
    return {name.split(":")[0] for name in names}


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a value with this layout lies: pending where the value is replicated, and the other way
    round; sharded and invariant as the value is."""
    return layout.with_partial(unused_axes(layout))
