"""Calls of handlers in traced programs, their gradients, and their behaviour under vmap."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from torch_overlap.jax._library import register_handlers, target_name

Array = Any


def result(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def none(dtype: Any = jnp.float32) -> Array:
    """Returns the operand that stands for none: XLA has no optional operands."""
    return jnp.zeros((0,), dtype)


def varying(axis: str | None, *arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays as shard_map with check_vma=True must see operands: all vary over `axis`, and over what others
    do. Elsewhere they stay as they are."""
    axes = set().union(*map(_varying_axes, arrays))
    if axis is not None and size_in_shard_map(axis) is not None:
        axes.add(axis)
    missing = [tuple(sorted(axes - _varying_axes(x))) for x in arrays]
    return tuple(
        jax.lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True)
    )


def size_in_shard_map(axis: str) -> int | None:
    """Returns the size of a mesh axis while a function is traced for one of its ranks; else None."""
    try:
        return int(jax.lax.axis_size(axis))
    except NameError:
        return None


def _varying_axes(x: Array) -> set[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return set() if kind is None else set(kind.varying)


def ffi_call(
    handler: str,
    results: Any,
    *operands: Array,
    communicates: bool = True,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Calls a handler. Integers become 64-bit attributes, which the handlers expect.

    A call that communicates has a side effect: other ranks wait for it, so that it may not be removed if its result is
    unused.
    """
    register_handlers()
    converted = {
        name: np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in attributes.items()
    }
    function = jax.ffi.ffi_call(
        target_name(handler), results, has_side_effect=communicates, input_output_aliases=aliases
    )
    out = function(*operands, **converted)
    axes = tuple(sorted(set().union(*map(_varying_axes, operands))))
    return jax.tree.map(lambda one: jax.lax.pcast(one, axes, to="varying"), out) if axes else out


def differentiable(backward: Callable[..., tuple[Any, ...]], num_saved: int = 0) -> Callable[..., Any]:
    """Returns a decorator for a function of operands and static arguments, of which the first is named `axis`.

    `backward` gets the first `num_saved` operands, the gradient of the result and the static arguments, and returns the
    gradients of the operands.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        num_operands = names.index("axis")
        decorated: Any = jax.custom_vjp(function, nondiff_argnums=tuple(range(num_operands, len(names))))

        def forward(*arguments: Any) -> tuple[Any, Any]:
            return decorated(*arguments), arguments[:num_saved]

        def run_backward(*arguments: Any) -> tuple[Any, ...]:
            *static, saved, grad = arguments
            return backward(*saved, grad, *static)

        decorated.defvjp(forward, run_backward)
        return decorated

    return decorate


def with_batches(op: str, function: Callable[..., Any], num_operands: int, *dims: int) -> Callable[..., Any]:
    """Returns function(*operands, *dims) that supports vmap over its first operand.

    `dims` are dimensions of the first operand that the function gets as arguments. The batch becomes the outermost
    dimension of the operand and of each result, and dims grow by 1.

    Raises, under vmap over another operand:
        NotImplementedError: that would be another product for each element.
    """

    def call(*operands: Array) -> Any:
        return function(*operands, *dims)

    def rule(axis_size: int, in_batched: Sequence[bool], *operands: Array) -> Any:
        del axis_size
        if any(in_batched[1:num_operands]):
            raise NotImplementedError(
                f"{op}: expected vmap over x alone, got it over another operand. Call {op} for each of its elements, "
                "or use lax.scan or lax.map, which do."
            )
        out = with_batches(op, function, num_operands, *(dim + 1 for dim in dims))(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return _with_rule(call, rule)


def without_batches(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which raises NotImplementedError under vmap."""

    def rule(axis_size: int, in_batched: Sequence[bool], *operands: Array) -> Any:
        raise NotImplementedError(
            f"{op}: expected no vmap, got one over {axis_size} elements. Put the batch into the rows of lhs, or use "
            "lax.scan or lax.map, which call it for each element."
        )

    return _with_rule(function, rule)


def _with_rule(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    batched: Any = custom_vmap(function)
    batched.def_vmap(rule)
    return functools.partial(batched)


def checked_dim(op: str, what: str, dim: int, x: Array) -> int:
    """Returns `dim` >= 0. Raises ValueError if `x` has no such dimension."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{op}: expected {what} in [{-x.ndim}, {x.ndim}), got {dim} for shape {x.shape}. Name a dimension of x."
        )
    return int(dim % x.ndim)


def check_shared(op: str, what: str, length: int, ranks: int) -> None:
    """Raises ValueError unless `ranks` ranks can share `length` elements equally."""
    if length % ranks:
        raise ValueError(f"{op}: expected {what} that {ranks} ranks can share equally, got {length}. Pad it.")
