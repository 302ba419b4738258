"""Products of a tensor-parallel layer, overlapped with their communication. All have gradients.

A weight is [in_features, out_features], as in x @ w. The functions are for shard_map (with check_vma=False) and for
jit in processes with one device each; torch_overlap.jax.partition has products of global arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from torch_overlap.jax._ffi import (
    Array,
    check_shared,
    checked_dim,
    differentiable,
    ffi_call,
    none,
    result,
    varying,
    with_batches,
)
from torch_overlap.jax.axis import Axis, find_axis
from torch_overlap.jax.collectives import all_gather, all_reduce, reduce_scatter

ALGORITHMS = ("auto", "fused", "p2p", "low_latency", "pipelined", "sequential", "bulk")
__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]


def all_gather_matmul(
    x: Array, w: Array, axis: Axis | str, *, bias: Array | None = None, dim: int = 0, algorithm: str = "auto"
) -> Array:
    """Returns all_gather(x, axis, dim) @ w (+ bias): the first product of a sequence-parallel layer.

    Args:
        x: [..., k], this rank's part of dimension `dim`, which is not the last one.
        w: [k, n], this rank's columns.
        axis: from bootstrap().
        bias: [n], or None.
        dim: the dimension of x that is split over the ranks.
        algorithm: how product and communication are overlapped; see docs/reference/operators.md.
    """
    op = "all_gather_matmul"
    axis = find_axis(op, axis)
    x, w, bias = _checked(op, axis, x, w, bias, algorithm)
    return _all_gather_matmul(x, w, bias, axis, _row_dim(op, dim, x), algorithm)


def matmul_reduce_scatter(
    x: Array, w: Array, axis: Axis | str, *, bias: Array | None = None, dim: int = 0, algorithm: str = "auto"
) -> Array:
    """Returns reduce_scatter(x @ w, axis, dim) (+ bias): the second product of a sequence-parallel layer.

    Args:
        x: [..., k], this rank's columns.
        w: [k, n], this rank's rows.
        axis: from bootstrap().
        bias: [n], added once to the sum; or None. Equal on all ranks.
        dim: the dimension of the result that is split over the ranks; not the last one.
        algorithm: how product and communication are overlapped; see docs/reference/operators.md.
    """
    op = "matmul_reduce_scatter"
    axis = find_axis(op, axis)
    x, w, bias = _checked(op, axis, x, w, bias, algorithm)
    dim = _row_dim(op, dim, x)
    check_shared(op, f"a dimension {dim} of x", x.shape[dim], axis.size)
    return _matmul_reduce_scatter(x, w, bias, axis, dim, algorithm)


def matmul_all_reduce(
    x: Array, w: Array, axis: Axis | str, *, bias: Array | None = None, algorithm: str = "auto"
) -> Array:
    """Returns all_reduce(x @ w, axis) (+ bias): the second product of a tensor-parallel layer.

    Args:
        x: [..., k], this rank's columns.
        w: [k, n], this rank's rows.
        axis: from bootstrap().
        bias: [n], added once to the sum; or None. Equal on all ranks.
        algorithm: how product and communication are overlapped; see docs/reference/operators.md.
    """
    op = "matmul_all_reduce"
    axis = find_axis(op, axis)
    x, w, bias = _checked(op, axis, x, w, bias, algorithm)
    return _matmul_all_reduce(x, w, bias, axis, algorithm)


def _checked(
    op: str, axis: Axis, x: Array, w: Array, bias: Array | None, algorithm: str
) -> tuple[Array, Array, Array | None]:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{op}: expected algorithm to be one of {', '.join(ALGORITHMS)}, got {algorithm!r}. Pass one.")
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: expected x [..., k] and w [k, n], got shapes {x.shape} and {w.shape}. Transpose or reshape one."
        )
    check_dtypes(op, x, w)
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (w.shape[1],):
            raise ValueError(
                f"{op}: expected bias of shape {(w.shape[1],)}, got {bias.shape}. It has one entry per column of w."
            )
        if bias.dtype != x.dtype:
            raise TypeError(f"{op}: expected bias of dtype {x.dtype} as x, got {bias.dtype}. Convert one of them.")
        return varying(axis.name, x, w, bias)
    return *varying(axis.name, x, w), None


def check_dtypes(op: str, x: Array, w: Array) -> None:
    if x.dtype == bool:
        raise TypeError(f"{op}: expected x of numbers, got dtype bool. Convert it to integers.")
    if x.dtype != w.dtype:
        raise TypeError(f"{op}: expected w of dtype {x.dtype} as x, got {w.dtype}. Convert one of them.")


def _row_dim(op: str, dim: int, x: Array) -> int:
    dim = checked_dim(op, "dim", dim, x)
    if dim == x.ndim - 1:
        raise ValueError(f"{op}: expected dim to be a dimension of rows, got the last one of shape {x.shape}. Move it.")
    return dim


def _bias_operand(bias: Array | None, x: Array) -> Array:
    return none(x.dtype) if bias is None else bias


def _rows_times(x: Array, grad: Array) -> Array:
    """Returns x^T @ grad over all dimensions but the last: the gradient of a weight."""
    contracted = tuple(range(x.ndim - 1))
    return jnp.tensordot(x, grad, axes=(contracted, contracted))


def _bias_grad(bias: Array | None, grad: Array) -> Array | None:
    return None if bias is None else grad.sum(tuple(range(grad.ndim - 1))).astype(bias.dtype)


def _gather_product(
    x: Array, w: Array, bias: Array | None, axis: Axis, dim: int, algorithm: str, gathered: bool
) -> Any:
    def run(x: Array, w: Array, bias: Array, dim: int) -> Any:
        rows = list(x.shape)
        rows[dim] *= axis.size
        shapes = (
            result([*rows[:-1], w.shape[1]], x.dtype),
            result(rows if gathered else (*x.shape[:-1], 0), x.dtype),
        )
        return ffi_call("AllGatherMatmulHandler", shapes, x, w, bias, axis=axis.id, dim=dim, algorithm=algorithm)

    return with_batches("all_gather_matmul", run, 3, dim)(x, w, _bias_operand(bias, x))


def _all_gather_matmul_backward(
    x: Array, w: Array, bias: Array | None, grad: Array, axis: Axis, dim: int, algorithm: str
) -> tuple[Any, ...]:
    x_grad = _matmul_reduce_scatter(grad, w.T, None, axis, dim, algorithm)
    return x_grad, _rows_times(all_gather(x, axis, dim), grad), _bias_grad(bias, grad)


@differentiable(_all_gather_matmul_backward, num_saved=3)
def _all_gather_matmul(x: Array, w: Array, bias: Array | None, axis: Axis, dim: int, algorithm: str) -> Array:
    return _gather_product(x, w, bias, axis, dim, algorithm, gathered=False)[0]


# The product and the gathered x.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product_and_rows(x: Array, w: Array, axis: Axis, dim: int, algorithm: str) -> tuple[Array, Array]:
    product, rows = _gather_product(x, w, None, axis, dim, algorithm, gathered=True)
    return product, rows


def _product_and_rows_forward(x: Array, w: Array, axis: Axis, dim: int, algorithm: str) -> tuple[Any, Any]:
    product, rows = _product_and_rows(x, w, axis, dim, algorithm)
    return (product, rows), (w, rows)


def _product_and_rows_backward(axis: Axis, dim: int, algorithm: str, saved: Any, grads: Any) -> tuple[Array, Array]:
    w, rows = saved
    grad, rows_grad = grads
    x_grad = _matmul_reduce_scatter(grad, w.T, None, axis, dim, algorithm) + reduce_scatter(rows_grad, axis, dim)
    return x_grad, _rows_times(rows, grad)


_product_and_rows.defvjp(_product_and_rows_forward, _product_and_rows_backward)


def _matmul_reduce_scatter_backward(
    x: Array, w: Array, bias: Array | None, grad: Array, axis: Axis, dim: int, algorithm: str
) -> tuple[Any, ...]:
    x_grad, gathered = _product_and_rows(grad, w.T, axis, dim, algorithm)
    return x_grad, _rows_times(x, gathered), _bias_grad(bias, grad)


@differentiable(_matmul_reduce_scatter_backward, num_saved=3)
def _matmul_reduce_scatter(x: Array, w: Array, bias: Array | None, axis: Axis, dim: int, algorithm: str) -> Array:
    def run(x: Array, w: Array, bias: Array, dim: int) -> Array:
        shape = [*x.shape[:-1], w.shape[1]]
        shape[dim] //= axis.size
        return ffi_call(
            "MatmulReduceScatterHandler",
            result(shape, x.dtype),
            x,
            w,
            bias,
            axis=axis.id,
            dim=dim,
            algorithm=algorithm,
        )

    return with_batches("matmul_reduce_scatter", run, 3, dim)(x, w, _bias_operand(bias, x))


# For partition.py: the operands are checked, and this rank's.
gather_product, product_scatter = _all_gather_matmul, _matmul_reduce_scatter


def _matmul_all_reduce_backward(
    x: Array, w: Array, bias: Array | None, grad: Array, axis: Axis, algorithm: str
) -> tuple[Any, ...]:
    # The gradient of a sum is the sum of the ranks' gradients: that of lax.psum in shard_map with check_vma=False.
    total = all_reduce(grad, axis)
    return total @ w.T, _rows_times(x, total), _bias_grad(bias, grad)


@differentiable(_matmul_all_reduce_backward, num_saved=3)
def _matmul_all_reduce(x: Array, w: Array, bias: Array | None, axis: Axis, algorithm: str) -> Array:
    def run(x: Array, w: Array, bias: Array) -> Array:
        shape = (*x.shape[:-1], w.shape[1])
        return ffi_call("MatmulAllReduceHandler", result(shape, x.dtype), x, w, bias, axis=axis.id, algorithm=algorithm)

    return with_batches("matmul_all_reduce", run, 3)(x, w, _bias_operand(bias, x))
