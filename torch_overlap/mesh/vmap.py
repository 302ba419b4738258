"""vmap: maps a function of one example over Sharded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils import _pytree as pytree

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.connect import mesh_without
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, spec_of, used_axes

__all__ = ["vmap"]


def vmap(
    fn: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    spmd_axis_name: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Maps `fn`, a function of one example, over batches: torch.vmap for Sharded values and plain tensors.

        logits = vmap(model, in_dims=(0, None), spmd_axis_name="dp")(tokens, weight)

    Inside, shapes and layouts do not contain the mapped dimension, and dimensions count without it. Each rank runs its
    examples at once, and a collective moves all of them in one call. If axes of the mesh shard the mapped dimension,
    values inside are on a mesh of the other axes: `fn` cannot communicate between examples. Arguments are converted to
    that mesh; values that `fn` captures are not, so pass weights as arguments (in_dims None).

    Args:
        fn: a function of Sharded values, tensors and anything else, in nested tuples, lists and dicts; it returns
            tensors.
        in_dims, out_dims: as for torch.vmap: the mapped dimension of each argument and result, or None.
        spmd_axis_name: the axes that shard the mapped dimension; an argument whose mapped dimension is whole is cut,
            which sends nothing. Default: those of the arguments.

    An argument that is not mapped is gathered along those axes if it is sharded there, and its gradient is the sum over
    all examples. The mapped dimension of a result is sharded like those of the arguments.

    The first call with other axes makes the mesh of the remaining ones: it is collective over all ranks, and not
    allowed in a CUDA graph capture. Products are not fused with communication inside.

    Raises:
        InvalidValueError: mapped dimensions of different sizes or layouts, or of a size that the ranks along the axes
            do not divide; Sharded values of several meshes; a mapped result with out_dims None.
        InvalidTypeError: a plain tensor that is mapped, or a mapped result, if axes shard the mapped dimension.
    """
    named = [spmd_axis_name] if isinstance(spmd_axis_name, str) else list(spmd_axis_name or ())

    def mapped(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        batch = _Batch(leaves, _dims("in_dims", in_dims, leaves, structure), named)
        results: list[_Result] = []
        shape: list[pytree.TreeSpec] = []

        def on_locals(*locals_: Any) -> tuple[Tensor, ...]:
            values = [x if spec is None else Sharded(x, spec) for x, spec in zip(locals_, batch.specs, strict=True)]
            found, found_shape = pytree.tree_flatten(fn(*pytree.tree_unflatten(values, structure)))
            dims = _dims("out_dims", out_dims, found, found_shape)
            results[:] = [_Result(value, dim) for value, dim in zip(found, dims, strict=True)]
            shape[:] = [found_shape]
            return tuple(r.local for r in results if r.dim is not None)

        batched = iter(torch.vmap(on_locals, in_dims=tuple(batch.dims))(*batch.locals))
        return pytree.tree_unflatten([batch.leave(r, batched) for r in results], shape[0])

    return mapped


def _dims(what: str, dims: Any, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[int | None]:
    """Returns the dimension of each leaf. A bare leaf also accepts a tuple of one."""
    if isinstance(dims, list):
        dims = tuple(dims)
    if isinstance(dims, tuple) and len(dims) == 1 and structure.is_leaf():
        dims = dims[0]
    found = pytree._broadcast_to_and_flatten(dims, structure)
    if found is None:
        raise InvalidValueError(f"vmap: expected {what} of the structure of the values, {structure}, got {dims}")
    out: list[int | None] = []
    for leaf, dim in zip(leaves, found, strict=True):
        if dim is not None:
            if not isinstance(leaf, Tensor | Sharded) or not isinstance(dim, int):
                raise InvalidTypeError(
                    f"vmap: expected {what} None for what is no tensor, got {dim!r} for {type(leaf).__name__}"
                )
            count = leaf.dim() + (what == "out_dims")
            if not -count <= dim < count:
                raise InvalidValueError(
                    f"vmap: expected {what} in [{-count}, {count - 1}] for {leaf.dim()} dimensions, got {dim}"
                )
            dim %= count
        out.append(dim)
    return out


class _Result:
    """A result of `fn`: a local tensor that leaves torch.vmap, or any other value."""

    def __init__(self, value: Any, dim: int | None) -> None:
        self.spec = value.spec if isinstance(value, Sharded) else None
        self.local: Any = value.local if isinstance(value, Sharded) else value
        self.dim = dim
        local = self.local
        is_mapped = isinstance(local, Tensor) and functorch.is_batchedtensor(local)
        if dim is None and is_mapped and functorch.maybe_get_level(local) == functorch.maybe_current_level():
            raise InvalidValueError("vmap: expected a result that is the same for all examples with out_dims None, got "
                                    "one that differs; give its dimension in out_dims")  # fmt: skip


class _Batch:
    """The arguments, in the form of torch.vmap.

    Attributes:
        locals, dims: Tensors, or other values, and their mapped dimensions.
        specs: The ValueSpecs inside of the Sharded arguments.
    """

    def __init__(self, leaves: Sequence[Any], dims: Sequence[int | None], named: Sequence[str]) -> None:
        self.dims = list(dims)
        self._mesh = _mesh_of(leaves)
        mapped = [(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
        if not mapped:
            raise InvalidValueError("vmap: expected an argument that is mapped, got in_dims None for all")
        self._size = _only("one size of all mapped dimensions", {leaf.shape[dim] for leaf, dim in mapped})
        if named and self._mesh is None:
            raise InvalidTypeError(f"vmap: expected a Sharded among the arguments with spmd_axis_name {list(named)}")
        self._axes = self._mapped_axes(mapped, tuple(named))
        self._inner = mesh_without(self._mesh, self._axes) if self._mesh and self._axes else self._mesh
        entered = [self._enter(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        self.locals = [local for local, _ in entered]
        self.specs = [spec for _, spec in entered]

    def _mapped_axes(self, mapped: Sequence[tuple[Any, int]], named: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes that shard the mapped dimension."""
        values = [(x, dim) for x, dim in mapped if isinstance(x, Sharded)]
        found = {x.layout.dims[dim] for x, dim in values}
        if named:
            wrong = found - {(), named}
            if wrong:
                raise InvalidValueError(
                    f"vmap: expected mapped dimensions that are whole or sharded over {named}, as spmd_axis_name says, "
                    f"got one over {wrong.pop()}; reshard it"
                )
        axes = named or (
            _only("mapped dimensions sharded alike (reshard them, or give spmd_axis_name)", found) if found else ()
        )
        if not axes:
            return ()
        assert self._mesh is not None
        parts = 1
        for name in axes:
            parts *= self._mesh.mesh.axes[name] if name in self._mesh.mesh.axes else self._mesh.mesh.axis(name).size
            if ":" in name:
                raise InvalidValueError(f"vmap: expected whole axes of the mesh in the mapped dimension, got {name}")
        if self._size % parts:
            raise InvalidValueError(
                f"vmap: expected a mapped dimension divisible by the {parts} ranks of {list(axes)}, got {self._size}; "
                "gather it, or pad it"
            )
        return tuple(axes)

    def _enter(self, leaf: Any, dim: int | None) -> tuple[Any, ValueSpec | None]:
        """Returns the local tensor of an argument, and its ValueSpec inside."""
        if not isinstance(leaf, Sharded):
            if dim is not None and self._axes:
                raise InvalidTypeError(
                    f"vmap: expected Sharded arguments where {list(self._axes)} shard the mapped dimension, got a "
                    f"plain tensor of shape {tuple(leaf.shape)} that is mapped; shard it first"
                )
            return leaf, None
        layout = leaf.layout
        if self._axes:
            others = [[n for n in names if n not in self._axes] for names in layout.dims]
            if dim is not None:
                taken = used_axes(layout.with_dims([() if d == dim else n for d, n in enumerate(layout.dims)]))
                if taken & set(self._axes):
                    raise InvalidValueError(
                        f"vmap: expected {list(self._axes)} to shard nothing but the mapped dimension {dim}, got "
                        f"{layout}; reshard it"
                    )
                others[dim] = list(self._axes)
            partial = {name: kind for name, kind in layout.partial.items() if name not in self._axes}
            left = [name for name in layout.invariant if name not in self._axes]
            layout = Layout(layout.mesh, others, partial, left)
            leaf = Sharded(leaf._reshard(layout).local, leaf.spec)
        assert self._inner is not None
        dims = [names for d, names in enumerate(layout.dims) if d != dim]
        shape = [n for d, n in enumerate(leaf.shape) if d != dim]
        inside = Layout(self._inner.mesh, dims, layout.partial, layout.invariant)
        return leaf.local, spec_of(self._inner, inside, shape, leaf.dtype, leaf.spec.anchored)

    def leave(self, result: _Result, batched: Any) -> Any:
        """Returns a result with its batch dimension."""
        spec, dim = result.spec, result.dim
        local = result.local if dim is None else next(batched).movedim(0, dim)
        if spec is None:
            if self._axes and dim is not None:
                raise InvalidTypeError(
                    f"vmap: expected Sharded results where {list(self._axes)} shard the mapped dimension, got a plain "
                    f"tensor of shape {tuple(local.shape)}"
                )
            return local
        if spec.mesh is not self._inner:
            raise InvalidValueError(f"vmap: expected results on {self._inner}, got one on {spec.mesh}")
        dims, shape = [list(names) for names in spec.layout.dims], list(spec.shape)
        if dim is not None:
            dims.insert(dim, list(self._axes))
            shape.insert(dim, self._size)
        assert self._mesh is not None
        layout = Layout(self._mesh.mesh, dims, spec.layout.partial, spec.layout.invariant)
        return Sharded(local, spec_of(self._mesh, layout, shape, spec.dtype))


def _mesh_of(leaves: Sequence[Any]) -> MeshComms | None:
    meshes = {id(leaf.mesh): leaf.mesh for leaf in leaves if isinstance(leaf, Sharded)}
    if len(meshes) > 1:
        raise InvalidValueError(f"vmap: expected arguments on one mesh, got {list(meshes.values())}")
    return next(iter(meshes.values()), None)


def _only(what: str, found: set[Any]) -> Any:
    if len(found) != 1:
        raise InvalidValueError(f"vmap: expected {what}, got {sorted(found)}")
    return found.pop()
