"""Collectives over a mesh axis, for shard_map and for jit in processes with one device each. All have gradients.

Gradients are those of jax.lax in shard_map with check_vma=False: the transposed collective.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from torch_overlap.jax._ffi import (
    Array,
    check_shared,
    checked_dim,
    differentiable,
    ffi_call,
    result,
    varying,
    with_batches,
)
from torch_overlap.jax.axis import Axis, find_axis

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter"]

_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def all_reduce(x: Array, axis: Axis | str, op: str = "sum") -> Array:
    """Returns the reduction of all ranks' `x`.

    Args:
        x: an array of equal shape and dtype on all ranks.
        axis: from bootstrap().
        op: sum, avg, product, min, max, band, bor or bxor. The first two have gradients.
    """
    _check_op("all_reduce", op)
    axis, x = _operand("all_reduce", axis, x)
    return _all_reduce(x, axis, op)


def all_gather(x: Array, axis: Axis | str, dim: int = 0) -> Array:
    """Returns the concatenation of every rank's `x` along `dim`, in the order of ranks."""
    axis, x = _operand("all_gather", axis, x)
    return _all_gather(x, axis, checked_dim("all_gather", "dim", dim, x))


def reduce_scatter(x: Array, axis: Axis | str, dim: int = 0, op: str = "sum") -> Array:
    """Returns this rank's part, along `dim`, of the reduction of all ranks' `x`."""
    axis, x = _operand("reduce_scatter", axis, x)
    _check_op("reduce_scatter", op)
    dim = checked_dim("reduce_scatter", "dim", dim, x)
    check_shared("reduce_scatter", f"a dimension {dim} of x", x.shape[dim], axis.size)
    return _reduce_scatter(x, axis, dim, op)


def all_to_all(x: Array, axis: Axis | str, split_dim: int, concat_dim: int) -> Array:
    """Sends part r of `x` along `split_dim` to rank r; returns the received parts, concatenated along `concat_dim`."""
    axis, x = _operand("all_to_all", axis, x)
    split_dim = checked_dim("all_to_all", "split_dim", split_dim, x)
    concat_dim = checked_dim("all_to_all", "concat_dim", concat_dim, x)
    check_shared("all_to_all", f"a dimension {split_dim} of x", x.shape[split_dim], axis.size)
    return _all_to_all(x, axis, split_dim, concat_dim)


def broadcast(x: Array, axis: Axis | str, root: int = 0) -> Array:
    """Returns the `x` of rank `root`. Its gradient is the sum of all ranks', on that rank."""
    axis, x = _operand("broadcast", axis, x)
    root = operator.index(root)
    if not 0 <= root < axis.size:
        raise ValueError(f"broadcast: expected root in [0, {axis.size}), got {root}. Name a rank of the axis.")
    return _broadcast(x, axis, root)


def permute(x: Array, axis: Axis | str, pairs: Sequence[tuple[int, int]]) -> Array:
    """Sends `x` from the first to the second rank of each pair. A rank that receives nothing gets zeros."""
    axis, x = _operand("permute", axis, x)
    flat = tuple((int(source), int(target)) for source, target in pairs)
    sources, targets = [source for source, _ in flat], [target for _, target in flat]
    if len(set(sources)) != len(sources) or len(set(targets)) != len(targets):
        raise ValueError(
            f"permute: expected each rank at most once as source and as target in pairs, got {flat}. Split them."
        )
    if not all(0 <= rank < axis.size for rank in sources + targets):
        raise ValueError(f"permute: expected ranks in [0, {axis.size}) in pairs, got {flat}. Name ranks of the axis.")
    return _permute(x, axis, flat)


def _operand(op: str, axis: Axis | str, x: Array) -> tuple[Axis, Array]:
    found = find_axis(op, axis)
    return found, *varying(found.name, jnp.asarray(x))


def _check_op(name: str, op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"{name}: expected op to be one of {', '.join(_OPS)}, got {op!r}. Pass one of them.")


def _check_differentiable(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise NotImplementedError(
            f"{name}: expected op sum or avg where a gradient is asked, got {op}. Use one of them."
        )


def _all_reduce_backward(grad: Array, axis: Axis, op: str) -> tuple[Array]:
    _check_differentiable("all_reduce", op)
    return (_all_reduce(grad, axis, op),)


@differentiable(_all_reduce_backward)
def _all_reduce(x: Array, axis: Axis, op: str) -> Array:
    def run(x: Array) -> Array:
        return ffi_call("AllReduceHandler", result(x.shape, x.dtype), x, aliases={0: 0}, axis=axis.id, op=op)

    return with_batches("all_reduce", run, 1)(x)


def _all_gather_backward(grad: Array, axis: Axis, dim: int) -> tuple[Array]:
    return (_reduce_scatter(grad, axis, dim, "sum"),)


@differentiable(_all_gather_backward)
def _all_gather(x: Array, axis: Axis, dim: int) -> Array:
    def run(x: Array, dim: int) -> Array:
        shape = list(x.shape)
        shape[dim] *= axis.size
        return ffi_call("AllGatherHandler", result(shape, x.dtype), x, axis=axis.id, dim=dim)

    return with_batches("all_gather", run, 1, dim)(x)


def _reduce_scatter_backward(grad: Array, axis: Axis, dim: int, op: str) -> tuple[Array]:
    _check_differentiable("reduce_scatter", op)
    gathered = _all_gather(grad, axis, dim)
    return (gathered / axis.size if op == "avg" else gathered,)


@differentiable(_reduce_scatter_backward)
def _reduce_scatter(x: Array, axis: Axis, dim: int, op: str) -> Array:
    def run(x: Array, dim: int) -> Array:
        shape = list(x.shape)
        shape[dim] //= axis.size
        return ffi_call("ReduceScatterHandler", result(shape, x.dtype), x, axis=axis.id, dim=dim, op=op)

    return with_batches("reduce_scatter", run, 1, dim)(x)


def _all_to_all_backward(grad: Array, axis: Axis, split_dim: int, concat_dim: int) -> tuple[Array]:
    return (_all_to_all(grad, axis, concat_dim, split_dim),)


@differentiable(_all_to_all_backward)
def _all_to_all(x: Array, axis: Axis, split_dim: int, concat_dim: int) -> Array:
    def run(x: Array, split_dim: int, concat_dim: int) -> Array:
        shape = list(x.shape)
        shape[split_dim] //= axis.size
        shape[concat_dim] *= axis.size
        attributes: dict[str, Any] = {"axis": axis.id, "split_dim": split_dim, "concat_dim": concat_dim}
        return ffi_call("AllToAllHandler", result(shape, x.dtype), x, **attributes)

    return with_batches("all_to_all", run, 1, split_dim, concat_dim)(x)


def _broadcast_backward(grad: Array, axis: Axis, root: int) -> tuple[Array]:
    # The sum to the root: the others keep zeros. A permutation of the root's sum to itself says who is the root.
    return (_permute(_all_reduce(grad, axis, "sum"), axis, ((root, root),)),)


@differentiable(_broadcast_backward)
def _broadcast(x: Array, axis: Axis, root: int) -> Array:
    def run(x: Array) -> Array:
        return ffi_call("BroadcastHandler", result(x.shape, x.dtype), x, aliases={0: 0}, axis=axis.id, root=root)

    return with_batches("broadcast", run, 1)(x)


def _permute_backward(grad: Array, axis: Axis, pairs: tuple[tuple[int, int], ...]) -> tuple[Array]:
    return (_permute(grad, axis, tuple((target, source) for source, target in pairs)),)


@differentiable(_permute_backward)
def _permute(x: Array, axis: Axis, pairs: tuple[tuple[int, int], ...]) -> Array:
    def run(x: Array) -> Any:
        flat = np.array(pairs, np.int64).reshape(-1)
        return ffi_call("PermuteHandler", result(x.shape, x.dtype), x, axis=axis.id, pairs=flat)

    return with_batches("permute", run, 1)(x)
