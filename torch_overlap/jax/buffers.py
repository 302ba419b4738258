"""Communication buffers of `gemm`, under the names of Transformer Engine's JAX extension."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from torch_overlap.jax._library import call
from torch_overlap.jax.axis import Axis, find_axis


class CommOverlapType(enum.IntEnum):
    """The collective that is overlapped with a GEMM."""

    NONE = 0
    RS = 1
    AG = 2


class CommOverlapMethod(enum.IntEnum):
    """The method of the overlap."""

    NONE = 0
    BULK = 1
    PIPELINE = 2
    RING_EXCHANGE = 3


class ScalingMode(enum.IntEnum):
    """The scaling of 8-bit operands: value = data * scale_inv."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    BLOCK_1D_SCALING = 4
    BLOCK_2D_SCALING = 5
    ROW_SCALING = 6


@dataclass(frozen=True)
class Buffer:
    """The parameters of a buffer on which the shapes of results depend."""

    comm_type: CommOverlapType
    method: CommOverlapMethod
    axis: Axis

    @property
    def tp_size(self) -> int:
        return self.axis.size


# XLA's numbers of dtypes (XLA_FFI_DataType).
_XLA_DTYPES = {
    "uint8": 6,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}

_buffers: dict[int, Buffer] = {}


def create_comm_overlap_buffer(
    axis: Axis | str,
    comm_type: CommOverlapType | int,
    method: CommOverlapMethod | int,
    buffer_shape: Sequence[int],
    buffer_dtype: Any,
    tp_size: int | None = None,
    num_splits: int | None = None,
    num_max_streams: int | None = None,
    comm_cga_size: int | None = None,
    gemm_priority: int = 0,
    comm_priority: int = 0,
    num_comm_sm: int | None = None,
    set_sm_margin: bool | None = None,
    use_ce: bool | None = None,
    atomic_gemm: bool = False,
    rs_overlap_first_gemm: bool = False,
    aggregate_ag: bool = False,
    relay_ag: bool = False,
) -> int:
    """Makes a buffer on every device of `axis`, and returns its number: the `comm_overlap_id` of `gemm`.

    Every process calls it, outside of jit. The number is equal on all processes. Equal parameters give the existing
    buffer, whose reference count is incremented.

    Args:
        axis: from bootstrap().
        comm_type: the collective. NONE is allowed only with BULK, which then supports both.
        method: BULK, PIPELINE (RS only) or RING_EXCHANGE.
        buffer_shape: (tokens, features) of all ranks: the maximum that a call may have.
        buffer_dtype: of the buffer.
        tp_size: must be the size of the axis, which is the default.
        num_splits, num_max_streams, comm_cga_size, gemm_priority, comm_priority, num_comm_sm, set_sm_margin, use_ce,
            atomic_gemm, rs_overlap_first_gemm, aggregate_ag, relay_ag: as in
            torch_overlap.create_comm_overlap_buffer().

    Raises:
        ValueError, TypeError, NotImplementedError: a parameter is invalid, or no method supports the combination.
    """
    op = "create_comm_overlap_buffer"
    axis = find_axis(op, axis)
    dtype = jnp.dtype(buffer_dtype).name
    if dtype not in _XLA_DTYPES:
        raise TypeError(
            f"{op}: expected buffer_dtype to be one of {', '.join(_XLA_DTYPES)}, got {dtype}. Convert the operand."
        )
    if len(buffer_shape) != 2:
        raise ValueError(
            f"{op}: expected buffer_shape to be (tokens, features), got {tuple(buffer_shape)}. "
            "Collapse the dimensions of tokens."
        )
    size = axis.size if tp_size is None else tp_size
    counts = {"num_splits": num_splits, "num_max_streams": num_max_streams, "comm_cga_size": comm_cga_size}
    flags = {"set_sm_margin": set_sm_margin, "use_ce": use_ce}
    made = call(
        "create_buffer",
        axis.id,
        int(comm_type),
        int(method),
        *(int(length) for length in buffer_shape),
        _XLA_DTYPES[dtype],
        size,
        *(_or_default(op, name, value) for name, value in counts.items()),
        operator.index(gemm_priority),
        operator.index(comm_priority),
        _or_default(op, "num_comm_sm", num_comm_sm),
        *(_or_default(op, name, value) for name, value in flags.items()),
        *(int(flag) for flag in (atomic_gemm, rs_overlap_first_gemm, aggregate_ag, relay_ag)),
    )
    _buffers[made] = Buffer(CommOverlapType(comm_type), CommOverlapMethod(method), axis)
    return made


def destroy_comm_overlap_buffer(id: int) -> None:
    """Decrements the reference count of a buffer, and destroys it at 0. ValueError for an unknown number."""
    call("destroy_buffer", id)


def destroy_all_comm_overlap_buffers() -> None:
    """Destroys all buffers, whatever their reference counts."""
    call("destroy_all_buffers")


def find_buffer(op: str, id: int) -> Buffer:
    """Returns what is known about a buffer. ValueError for a number that no buffer ever had."""
    if id not in _buffers:
        raise ValueError(
            f"{op}: expected comm_overlap_id to be the id of a live buffer, got {id}; "
            "make one with create_comm_overlap_buffer()"
        )
    return _buffers[id]


def _or_default(op: str, name: str, value: int | None) -> int:
    """Returns -1, which the library takes for the default, or a number that is not negative."""
    if value is None:
        return -1
    if operator.index(value) < 0:
        raise ValueError(f"{op}: expected {name} to be None or a number from 0, got {value}. Pass one.")
    return operator.index(value)
