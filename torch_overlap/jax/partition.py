"""Products of global arrays in plain jit: the partitioner splits them over a mesh axis, and we communicate.

The layouts are those of a tensor-parallel layer. With `axis` "tp":

    column_parallel   x P("tp", None)   w P(None, "tp")   ->  P(None, "tp")    gathers x
    row_parallel      x P(None, "tp")   w P("tp", None)   ->  P("tp", None)    reduce-scatters the result

Rows may be split over other axes too, outside of `axis`: P(("dp", "tp"), None). Operands in other layouts are moved to
these first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from torch_overlap.jax._ffi import Array, check_shared, differentiable, size_in_shard_map
from torch_overlap.jax.axis import Axis, check_mesh, find_axis
from torch_overlap.jax.products import ALGORITHMS, check_dtypes, gather_product, product_scatter

__all__ = ["column_parallel", "row_parallel"]

_RULE = "m k, k n -> m n"


def column_parallel(x: Array, w: Array, axis: Axis | str, *, algorithm: str = "auto") -> Array:
    """Returns x @ w for rows of x and columns of w that are split over `axis`. Differentiable; see the module.

    Args:
        x: [m, k]; the ranks share m equally.
        w: [k, n]; the ranks share n equally.
        axis: from bootstrap().
        algorithm: how product and communication are overlapped; see docs/reference/operators.md.
    """
    return _product("column_parallel", x, w, axis, algorithm)


def row_parallel(x: Array, w: Array, axis: Axis | str, *, algorithm: str = "auto") -> Array:
    """Returns x @ w for columns of x and rows of w that are split over `axis`. Differentiable; see the module.

    Args:
        x: [m, k]; the ranks share m and k equally.
        w: [k, n].
        axis: from bootstrap().
        algorithm: how product and communication are overlapped; see docs/reference/operators.md.
    """
    return _product("row_parallel", x, w, axis, algorithm)


def _product(op: str, x: Array, w: Array, axis: Axis | str, algorithm: str) -> Array:
    x, w = jnp.asarray(x), jnp.asarray(w)
    found = find_axis(op, axis)
    if size_in_shard_map(found.name) is not None:
        raise ValueError(
            f"{op}: expected global arrays, outside of shard_map, got one rank's parts. Call "
            f"{'all_gather_matmul' if op == 'column_parallel' else 'matmul_reduce_scatter'} there."
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{op}: expected algorithm to be one of {', '.join(ALGORITHMS)}, got {algorithm!r}. Pass one.")
    if any(AxisType.Explicit in jax.typeof(one).sharding.mesh.axis_types for one in (x, w)):
        raise ValueError(
            f"{op}: expected arrays of a mesh whose axes are Auto, which the partitioner splits, got Explicit ones. "
            "Pass axis_types=(jax.sharding.AxisType.Auto,) * ndim to jax.make_mesh()."
        )
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"{op}: expected x [m, k] and w [k, n], got shapes {x.shape} and {w.shape}. Reshape one.")
    check_dtypes(op, x, w)
    check_shared(op, "rows of x", x.shape[0], found.size)
    is_column = op == "column_parallel"
    check_shared(op, "columns of w" if is_column else "rows of w", w.shape[1 if is_column else 0], found.size)
    return _split_product(x, w, found, op, algorithm)


def _outer_axes(spec: Any, axis: str) -> tuple[str, ...]:
    """Returns the mesh axes of the rows, without `axis`."""
    rows = spec[0] if len(spec) else None
    names = () if rows is None else (rows,) if isinstance(rows, str) else tuple(rows)
    return tuple(name for name in names if name != axis)


def _spec(rows: tuple[str, ...], columns: str | None) -> PartitionSpec:
    return PartitionSpec(rows or None, columns)


def _layouts(op: str, outer: tuple[str, ...], axis: str) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Returns the layouts of x, w and the result."""
    if op == "column_parallel":
        return _spec((*outer, axis), None), PartitionSpec(None, axis), _spec(outer, axis)
    return _spec(outer, axis), PartitionSpec(axis, None), _spec((*outer, axis), None)


@functools.cache
def _partitioned(op: str, axis: Axis, algorithm: str) -> Callable[[Array, Array], Array]:
    """Returns the product that the partitioner splits."""

    product: Any = custom_partitioning(lambda x, w: x @ w)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del result_shape
        check_mesh(op, axis, mesh)
        outer = _outer_axes(arg_shapes[0].sharding.spec, axis.name)
        parts = math.prod(mesh.shape[name] for name in (*outer, axis.name))
        check_shared(op, f"rows of x, over axes {(*outer, axis.name)},", arg_shapes[0].shape[0], parts)
        x_spec, w_spec, out_spec = _layouts(op, outer, axis.name)

        def on_device(x: Array, w: Array) -> Array:
            run = gather_product if op == "column_parallel" else product_scatter
            return run(x, w, None, axis, 0, algorithm)

        shardings = [NamedSharding(mesh, spec) for spec in (x_spec, w_spec)]
        return mesh, on_device, NamedSharding(mesh, out_spec), tuple(shardings)

    def infer(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del result_shape
        outer = _outer_axes(arg_shapes[0].sharding.spec, axis.name)
        return NamedSharding(mesh, _layouts(op, outer, axis.name)[2])

    product.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=_RULE)
    return functools.partial(product)


def _backward(x: Array, w: Array, grad: Array, axis: Axis, op: str, algorithm: str) -> tuple[Array, Array]:
    """Returns the gradient of x, by the other product, and that of w, which is left to the partitioner."""
    other = "row_parallel" if op == "column_parallel" else "column_parallel"
    return _split_product(grad, w.T, axis, other, algorithm), x.T @ grad


@differentiable(_backward, num_saved=2)
def _split_product(x: Array, w: Array, axis: Axis, op: str, algorithm: str) -> Array:
    return _partitioned(op, axis, algorithm)(x, w)
