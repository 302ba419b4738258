"""The GEMM of Transformer Engine's JAX extension: epilogues, scales, and overlap over a communication buffer."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from torch_overlap.jax._ffi import Array, ffi_call, none, result, varying, without_batches
from torch_overlap.jax.axis import find_axis
from torch_overlap.jax.buffers import CommOverlapMethod, CommOverlapType, ScalingMode, find_buffer

__all__ = ["GemmResults", "gemm"]

_OPERANDS = ("lhs", "lhs_scale_inv", "rhs", "rhs_scale_inv", "bias", "gelu_input", "aux_in")
_HIGH_PRECISION = ("float32", "float16", "bfloat16", "float64")


class GemmResults(NamedTuple):
    """Results of a `gemm`. Absent ones have no elements."""

    output: Array
    bias_grad: Array
    pre_gelu_out: Array
    aux_out: Array
    lhs_swizzled: Array
    rhs_swizzled: Array
    workspace: Array


def gemm(
    lhs: Array,
    rhs: Array,
    *,
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
    bias: Array | None = None,
    gelu_input: Array | None = None,
    aux_in: Array | None = None,
    scaling_mode: ScalingMode | int = ScalingMode.NO_SCALING,
    comm_overlap_method: CommOverlapMethod | int = CommOverlapMethod.NONE,
    comm_type: CommOverlapType | int = CommOverlapType.NONE,
    comm_overlap_id: int = 0,
    lhs_axis_boundary: int = -1,
    rhs_axis_boundary: int = -1,
    aux_axis_boundary: int = -1,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    fuse_bias: bool = False,
    fuse_gelu: bool = False,
    grad: bool = False,
    use_split_accumulator: bool = False,
    out_dtype: Any = None,
    workspace_bytes: int = 0,
) -> GemmResults:
    """Returns op(lhs) @ op(rhs) with an epilogue, where op is the matrix as stored or its transpose.

    Args:
        lhs, rhs: collapsed to matrices: the dimensions before the axis boundary are the rows.
        lhs_scale_inv, rhs_scale_inv: scales of 8-bit operands, as `scaling_mode` says.
        bias: with fuse_bias: added to the product. With grad: gives the dtype of bias_grad.
        gelu_input: with fuse_gelu and grad: the pre_gelu_out of the forward call.
        aux_in: with method BULK: what the collective takes, this rank's rows to gather or all rows to reduce.
        scaling_mode: NO_SCALING for 16-, 32- and 64-bit operands.
        comm_overlap_method, comm_type, comm_overlap_id: a buffer of create_comm_overlap_buffer(), its method and the
            collective. AG with RING_EXCHANGE: lhs is this rank's rows, output the product of all ranks' rows, and
            aux_out these rows. RS: output is this rank's rows of the sum of all ranks' products. BULK: aux_out is the
            result of the collective of aux_in.
        lhs_axis_boundary, rhs_axis_boundary, aux_axis_boundary: number of leading dimensions that are rows; a negative
            number counts from the end.
        lhs_transposed, rhs_transposed: multiply by the transpose of the matrix.
        fuse_bias: add bias, or, with grad, compute bias_grad.
        fuse_gelu: apply GELU (tanh form) and return its input, or, with grad, multiply by its derivative.
        grad: the product is a gradient.
        use_split_accumulator: accumulate 8-bit products in fp32, on Hopper.
        out_dtype: of the output. Default: that of 16-bit and larger operands; of bias, or bfloat16, for 8-bit ones.
        workspace_bytes: memory that XLA gives to cuBLASLt. 0: a cached workspace of the stream.

    All ranks have the same shapes, so an RS result of m rows has ceil(m / tp_size) rows on every rank: rank r's begin
    at r * ceil(m / tp_size), and rows past the end are 0. The ranks share the first of several leading dimensions.

    Differentiable without scaling, communication and grad. vmap is refused.

    Raises:
        ValueError, TypeError: shapes or arguments that do not fit. What only the handler can check is raised as
            jax.errors.JaxRuntimeError when the program runs.
    """
    given = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, gelu_input, aux_in)  # in the order of _OPERANDS
    if operator.index(workspace_bytes) < 0:
        raise ValueError(
            f"gemm: expected workspace_bytes from 0, got {workspace_bytes}. Pass 0 for a cached workspace."
        )
    operands = tuple(none() if one is None else jnp.asarray(one) for one in given)
    attributes: dict[str, Any] = {
        "scaling_mode": int(scaling_mode),
        "comm_overlap_method": int(comm_overlap_method),
        "comm_type": int(comm_type),
        "comm_overlap_id": int(comm_overlap_id),
        "lhs_axis_boundary": int(lhs_axis_boundary),
        "rhs_axis_boundary": int(rhs_axis_boundary),
        "aux_axis_boundary": int(aux_axis_boundary),
        "lhs_transposed": bool(lhs_transposed),
        "rhs_transposed": bool(rhs_transposed),
        "fuse_bias": bool(fuse_bias),
        "fuse_gelu": bool(fuse_gelu),
        "grad": bool(grad),
        "use_split_accumulator": bool(use_split_accumulator),
    }
    static = _Static(
        tuple(attributes.items()), None if out_dtype is None else jnp.dtype(out_dtype).name, workspace_bytes
    )
    return GemmResults(*_gemm(operands, static))


class _Static(NamedTuple):
    attributes: tuple[tuple[str, Any], ...]
    out_dtype: str | None
    workspace_bytes: int


def _run(operands: tuple[Array, ...], static: _Static) -> tuple[Array, ...]:
    attributes = dict(static.attributes)

    def call(*operands: Array) -> Any:
        shapes = _result_shapes(dict(zip(_OPERANDS, operands, strict=True)), attributes, static)
        communicates = attributes["comm_type"] != CommOverlapType.NONE
        if communicates:
            axis = find_axis("gemm", find_buffer("gemm", attributes["comm_overlap_id"]).axis)
            operands = varying(axis.name, *operands)
        return ffi_call("GemmHandler", shapes, *operands, communicates=communicates, **attributes)

    return tuple(without_batches("gemm", call)(*operands))


_gemm = jax.custom_vjp(_run, nondiff_argnums=(1,))


def _forward(operands: tuple[Array, ...], static: _Static) -> tuple[tuple[Array, ...], Any]:
    results = _gemm(operands, static)
    return results, (operands, results[2])


def _backward(static: _Static, saved: Any, grads: tuple[Array, ...]) -> tuple[tuple[Any, ...]]:
    operands, pre_gelu = saved
    given = dict(zip(_OPERANDS, operands, strict=True))
    attributes = dict(static.attributes)
    if attributes["comm_type"] != CommOverlapType.NONE:
        raise NotImplementedError(
            "gemm: expected comm_type NONE where a gradient is asked, got "
            f"{CommOverlapType(attributes['comm_type']).name}. Its gradient is another collective over a buffer of its "
            "own; use all_gather_matmul or matmul_reduce_scatter, or write a custom_vjp."
        )
    if attributes["scaling_mode"] or attributes["grad"]:
        raise NotImplementedError(
            "gemm: expected NO_SCALING and grad=False where a gradient is asked, got others. Write a custom_vjp that "
            "calls gemm with grad=True."
        )
    lhs, rhs, bias = given["lhs"], given["rhs"], given["bias"]
    left = lhs.reshape(_collapse("lhs", lhs, attributes["lhs_axis_boundary"])[1:])
    right = rhs.reshape(_collapse("rhs", rhs, attributes["rhs_axis_boundary"])[1:])
    rows = left.shape[1 if attributes["lhs_transposed"] else 0]
    columns = right.shape[0 if attributes["rhs_transposed"] else 1]
    grad = grads[0].reshape(rows, columns)
    if attributes["fuse_gelu"]:
        before = pre_gelu.reshape(rows, columns).astype(grad.dtype)
        (grad,) = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), before)[1](grad)
        grad += grads[2].reshape(rows, columns).astype(grad.dtype)  # that of pre_gelu_out
    narrow = grad.astype(lhs.dtype)
    left_op = left.T if attributes["lhs_transposed"] else left
    right_op = right.T if attributes["rhs_transposed"] else right
    left_grad, right_grad = narrow @ right_op.T, left_op.T @ narrow
    found = {
        "lhs": (left_grad.T if attributes["lhs_transposed"] else left_grad).reshape(lhs.shape),
        "rhs": (right_grad.T if attributes["rhs_transposed"] else right_grad).reshape(rhs.shape),
    }
    if bias.size:
        found["bias"] = grad.sum(0).astype(bias.dtype).reshape(bias.shape)
    return (tuple(found.get(name, jnp.zeros_like(given[name])) for name in _OPERANDS),)


_gemm.defvjp(_forward, _backward)


def _collapse(what: str, x: Array, boundary: int) -> tuple[int, int, int]:
    """Returns the number of leading dimensions that are rows, and the rows and columns of the matrix."""
    if x.ndim == 0 or not -x.ndim <= boundary <= x.ndim:
        raise ValueError(
            f"gemm: expected {what}_axis_boundary in [{-x.ndim}, {x.ndim}], got {boundary} for shape {x.shape}. "
            "Dimensions before it are rows."
        )
    boundary = boundary + x.ndim if boundary < 0 else boundary
    return boundary, math.prod(x.shape[:boundary]), math.prod(x.shape[boundary:])


def _product_shape(lhs: Any, rhs: Array, attributes: dict[str, Any]) -> tuple[list[int], int, int]:
    """Returns the sizes of the output without communication, and its rows and columns as a matrix."""
    boundary, rows, columns = _collapse("lhs", lhs, attributes["lhs_axis_boundary"])
    m, k = (columns, rows) if attributes["lhs_transposed"] else (rows, columns)
    sizes = list(lhs.shape[boundary:] if attributes["lhs_transposed"] else lhs.shape[:boundary])
    boundary, rows, columns = _collapse("rhs", rhs, attributes["rhs_axis_boundary"])
    n, rhs_k = (rows, columns) if attributes["rhs_transposed"] else (columns, rows)
    sizes += rhs.shape[:boundary] if attributes["rhs_transposed"] else rhs.shape[boundary:]
    if k != rhs_k:
        raise ValueError(
            f"gemm: expected as many contracted elements in rhs as in lhs, {k}, got {rhs_k} in shape {rhs.shape} for "
            f"lhs of shape {lhs.shape} with lhs_transposed {attributes['lhs_transposed']} and rhs_transposed "
            f"{attributes['rhs_transposed']}. Look at these flags and at the axis boundaries."
        )
    return sizes, m, n


def _times_first(shape: Sequence[int], ranks: int) -> list[int]:
    return [shape[0] * ranks, *shape[1:]]


def _part_of_first(shape: Sequence[int], ranks: int) -> list[int]:
    return [-(-shape[0] // ranks), *shape[1:]]


def _swizzled_shape(scale_inv: Array, attributes: dict[str, Any]) -> tuple[int, ...]:
    is_swizzled = attributes["scaling_mode"] == ScalingMode.MXFP8_1D_SCALING and attributes["comm_type"] == 0
    if not is_swizzled or scale_inv.ndim != 2 or scale_inv.size == 0:
        return (0,)
    return (-(-scale_inv.shape[0] // 128) * 128, -(-scale_inv.shape[1] // 4) * 4)


def _result_shapes(given: dict[str, Array], attributes: dict[str, Any], static: _Static) -> tuple[Any, ...]:
    lhs, rhs, bias, aux_in = given["lhs"], given["rhs"], given["bias"], given["aux_in"]
    if attributes["comm_type"] not in tuple(CommOverlapType):
        raise ValueError(
            f"gemm: expected comm_type to be NONE (0), RS (1) or AG (2), got {attributes['comm_type']}, an invalid "
            "collective type. Use a CommOverlapType."
        )
    comm_type = CommOverlapType(attributes["comm_type"])
    buffer = find_buffer("gemm", attributes["comm_overlap_id"]) if comm_type else None
    is_bulk = buffer is not None and buffer.method == CommOverlapMethod.BULK
    whole = lhs
    if buffer is not None and not is_bulk and comm_type == CommOverlapType.AG:
        whole = result(_times_first(lhs.shape, buffer.tp_size), lhs.dtype)
    sizes, m, n = _product_shape(whole, rhs, attributes)
    wide = _wide_dtype(given)
    dtype = jnp.dtype(static.out_dtype) if static.out_dtype else wide
    saved_dtype = wide if dtype.itemsize == 1 else dtype
    aux = result((0,), saved_dtype)
    if buffer is not None and is_bulk and aux_in.size:
        gathers = comm_type == CommOverlapType.AG
        shape = (_times_first if gathers else _part_of_first)(aux_in.shape, buffer.tp_size)
        aux = result(shape, dtype if not gathers and aux_in.dtype.itemsize == 1 else aux_in.dtype)
    elif buffer is not None and comm_type == CommOverlapType.AG:
        aux = result(whole.shape, lhs.dtype)
    elif buffer is not None and not is_bulk:
        sizes = _part_of_first(sizes, buffer.tp_size)
    has_bias_grad = attributes["fuse_bias"] and attributes["grad"]
    has_pre_gelu = attributes["fuse_gelu"] and not attributes["grad"]
    bias_grad = (n if attributes["fuse_gelu"] else m,) if has_bias_grad else (0,)
    return (
        result(sizes, dtype),
        result(bias_grad, bias.dtype if bias.size else saved_dtype),
        result(sizes if has_pre_gelu else (0,), saved_dtype),
        aux,
        result(_swizzled_shape(given["lhs_scale_inv"], attributes), given["lhs_scale_inv"].dtype),
        result(_swizzled_shape(given["rhs_scale_inv"], attributes), given["rhs_scale_inv"].dtype),
        result((static.workspace_bytes,), jnp.uint8),
    )


def _wide_dtype(given: dict[str, Array]) -> Any:
    """Returns the dtype of 16 or more bits that results have by default."""
    if given["lhs"].dtype.name in _HIGH_PRECISION:
        return given["lhs"].dtype
    for name in ("bias", "gelu_input"):
        if given[name].size:
            return given[name].dtype
    return jnp.dtype(jnp.bfloat16)
