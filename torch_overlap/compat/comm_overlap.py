"""Transformer Engine's buffers for products that overlap with communication, by number and as objects.

    id = to.create_comm_overlap_buffer(comm, to.CommOverlapType.AG, to.CommOverlapMethod.RING_EXCHANGE,
                                       (tokens, features), torch.bfloat16)
    buffer = to.comm_overlap_buffer(id)
    buffer.split_overlap_ag(weight, True, x, False, y)      # y = all_gather(x) @ weight.T
    to.destroy_comm_overlap_buffer(id)

The classes, `CommOverlapBase` and `CommOverlapP2PBase`, are those of Transformer Engine over any group of ranks;
docs/explanation/overlap_classes.md describes the methods and their uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from torch_overlap import _C
from torch_overlap._C import (
    CommOverlapAlgo,
    CommOverlapBase,
    CommOverlapConfig,
    CommOverlapCore,
    CommOverlapMethod,
    CommOverlapP2PBase,
    CommOverlapType,
    OverlapGroup,
    TorchComm,
)

__all__ = [
    "CommOverlapAlgo",
    "CommOverlapBase",
    "CommOverlapConfig",
    "CommOverlapCore",
    "CommOverlapEntry",
    "CommOverlapHelper",
    "CommOverlapMethod",
    "CommOverlapP2PBase",
    "CommOverlapType",
    "OverlapGroup",
    "comm_overlap_buffer",
    "comm_overlap_buffers",
    "create_comm_overlap_buffer",
    "destroy_all_comm_overlap_buffers",
    "destroy_comm_overlap_buffer",
]


def create_comm_overlap_buffer(
    comm: TorchComm,
    comm_type: CommOverlapType,
    method: CommOverlapMethod,
    buffer_shape: Sequence[int],
    dtype: torch.dtype,
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
    """Makes a buffer, collectively over `comm`, and returns its number.

    The same communicator and the same parameters give the same number: the reference count of the buffer is then
    incremented, and each `destroy_comm_overlap_buffer` decrements it.

    Args:
        comm: the communicator of the buffer.
        comm_type: the collective to overlap. NONE is allowed only with BULK, which then supports both. AG is not
            allowed with PIPELINE, which reduces pieces of a product while others are computed: a gather precedes the
            product.
        method: the overlap method.
        buffer_shape: (tokens, features) of all ranks, the maximum of a call.
        dtype: of the buffer.
        tp_size: must be the size of `comm`, which is the default.
        num_splits: number of pieces of a PIPELINE. Default: 4, or the number of ranks for RING_EXCHANGE.
        num_max_streams: maximum number of concurrent products. Default: 3.
        comm_cga_size: number of blocks in a cluster of communication kernels. Default: 2, or 1 for RING_EXCHANGE. Must
            be 1 if copy engines do all transfers: with use_ce for RING_EXCHANGE, and for BULK of type AG.
        gemm_priority, comm_priority: priorities of streams; if both are 0, the lowest and the highest, respectively.
        num_comm_sm: number of blocks of communication kernels. Default: 16, or 1 for RING_EXCHANGE.
        set_sm_margin: if True, products leave num_comm_sm SMs free. Default: True, or False for RING_EXCHANGE.
        use_ce: if True, copy engines move gathered or exchanged data. Default: False, or True for RING_EXCHANGE.
        atomic_gemm: for `atomic_gemm_overlap_ag` and `_rs`. Not with BULK, where the product and the collective do not
            wait for each other.
        rs_overlap_first_gemm: if True, a PIPELINE issues a product before the reduction of the previous one.
        aggregate_ag: if True, RING_EXCHANGE of AG computes products of two chunks; even tp_size only.
        relay_ag: if True, RING_EXCHANGE forwards chunks from neighbour to neighbour, for links between neighbours only;
            otherwise each comes straight from its owner. Not with aggregate_ag.

    Raises:
        InvalidValueError, InvalidTypeError, UnsupportedError: on every rank, if the parameters of one are invalid or
            differ.
    """
    config = CommOverlapConfig(
        comm_type,
        method,
        list(buffer_shape),
        dtype,
        comm.get_size() if tp_size is None else tp_size,
        num_splits=num_splits,
        num_max_streams=num_max_streams,
        comm_cga_size=comm_cga_size,
        gemm_priority=gemm_priority,
        comm_priority=comm_priority,
        num_comm_sm=num_comm_sm,
        set_sm_margin=set_sm_margin,
        use_ce=use_ce,
        atomic_gemm=atomic_gemm,
        rs_overlap_first_gemm=rs_overlap_first_gemm,
        aggregate_ag=aggregate_ag,
        relay_ag=relay_ag,
    )
    return _C._create_comm_overlap_buffer(comm, config)


def destroy_comm_overlap_buffer(id: int) -> None:
    """Decrements the reference count of the buffer, and destroys it at 0.

    Args:
        id: the number that create_comm_overlap_buffer returned.

    Raises:
        InvalidValueError: the number is unknown, or its buffer was destroyed.
    """
    _C._destroy_comm_overlap_buffer(id)


def destroy_all_comm_overlap_buffers() -> None:
    """Destroys all remaining buffers, most recent first, whatever their reference counts."""
    _C._destroy_all_comm_overlap_buffers()


def comm_overlap_buffer(id: int) -> CommOverlapCore:
    """Returns the buffer of a number.

    Args:
        id: the number that create_comm_overlap_buffer returned.

    Raises:
        InvalidValueError: the number is unknown, or its buffer was destroyed.
    """
    return _C._find_comm_overlap_buffer(id)


@dataclass(frozen=True)
class CommOverlapEntry:
    """A buffer of the registry: the name of its communicator, its parameters, and its reference count."""

    comm: str
    config: CommOverlapConfig
    holds: int


def comm_overlap_buffers() -> dict[int, CommOverlapEntry]:
    """Returns all live buffers, by number."""
    return {id: CommOverlapEntry(*entry) for id, entry in _C._comm_overlap_buffers().items()}


@dataclass
class CommOverlapHelper:
    """The parameters of a buffer, as a value: set them, then call `create(comm)`. None means the default of the
    method."""

    comm_type: CommOverlapType = CommOverlapType.NONE
    method: CommOverlapMethod = CommOverlapMethod.NONE
    buffer_shape: Sequence[int] = ()
    buffer_dtype: torch.dtype = torch.bfloat16
    tp_size: int | None = None
    num_splits: int | None = None
    num_max_streams: int | None = None
    comm_cga_size: int | None = None
    gemm_priority: int = 0
    comm_priority: int = 0
    num_comm_sm: int | None = None
    set_sm_margin: bool | None = None
    use_ce: bool | None = None
    atomic_gemm: bool = False
    rs_overlap_first_gemm: bool = False
    aggregate_ag: bool = False
    relay_ag: bool = False

    @property
    def is_enabled(self) -> bool:
        """True if create() makes a buffer: the method is not NONE."""
        return self.method != CommOverlapMethod.NONE

    def create(self, comm: TorchComm) -> int:
        """Returns the number of the buffer, or 0 if the method is NONE."""
        if not self.is_enabled:
            return 0
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return create_comm_overlap_buffer(comm, dtype=values.pop("buffer_dtype"), **values)
