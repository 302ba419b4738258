"""Buffers for products that are overlapped with communication, by number and as objects.

    id = to.create_comm_overlap_buffer(comm, to.CommOverlapType.AG, to.CommOverlapMethod.RING_EXCHANGE,
                                       (tokens, features), torch.bfloat16)
    buffer = to.comm_overlap_buffer(id)
    buffer.split_overlap_ag(weight, True, x, False, y)      # y = all_gather(x) @ weight.T
    to.destroy_comm_overlap_buffer(id)

The classes, `CommOverlapBase` and `CommOverlapP2PBase`, are those of Transformer Engine over any group of ranks;
docs/overlap.md says which method is for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from torch_overlap import _C
from torch_overlap._C import (
    CommOverlapConfig,
    CommOverlapCore,
    CommOverlapMethod,
    CommOverlapType,
    TorchComm,
)

__all__ = [
    "CommOverlapEntry",
    "CommOverlapHelper",
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

    The same communicator and the same parameters give the same number: the buffer is then held once more, and each
    `destroy_comm_overlap_buffer` takes one hold back.

    Args:
        comm_type: what is overlapped; NONE only with BULK, which then does both. AG not with PIPELINE: it reduces
            pieces of a product while others are computed, and what is gathered comes before the product.
        buffer_shape: (tokens, features) of all ranks, the most that a call may have.
        tp_size: the size of `comm`, which is the default.
        num_splits: pieces of a PIPELINE; 4, or the number of ranks for RING_EXCHANGE.
        num_max_streams: products that run side by side; 3.
        comm_cga_size: blocks in a cluster of communication kernels; 2, or 1 for RING_EXCHANGE. Only 1 where copy
            engines carry all: with use_ce for RING_EXCHANGE, and for BULK of type AG.
        gemm_priority, comm_priority: of streams; both 0 means the least and the most urgent.
        num_comm_sm: blocks of communication kernels; 16, or 1 for RING_EXCHANGE.
        set_sm_margin: products leave num_comm_sm SMs free; True, or False for RING_EXCHANGE.
        use_ce: copy engines move what is gathered or exchanged; False, or True for RING_EXCHANGE.
        atomic_gemm: for `atomic_gemm_overlap_ag` and `_rs`. Not with BULK, where the product and the collective do not
            wait for each other.
        rs_overlap_first_gemm: a PIPELINE issues a product before the reduction of the one before it.
        aggregate_ag: RING_EXCHANGE of AG computes products of two chunks; even tp_size only.
        relay_ag: RING_EXCHANGE passes chunks on from neighbour to neighbour, for links between neighbours only; else
            each comes straight from its owner. Not with aggregate_ag.

    Raises:
        InvalidValueError, InvalidTypeError, UnsupportedError: on every rank, if the parameters of one are wrong or
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
    """Takes one hold of the buffer back; the last ends it. InvalidValueError for an unknown or dead number."""
    _C._destroy_comm_overlap_buffer(id)


def destroy_all_comm_overlap_buffers() -> None:
    """Ends all buffers that are left, the youngest first, however often they are held."""
    _C._destroy_all_comm_overlap_buffers()


def comm_overlap_buffer(id: int) -> CommOverlapCore:
    """The buffer of a number. Raises InvalidValueError for an unknown or dead one."""
    return _C._find_comm_overlap_buffer(id)


@dataclass(frozen=True)
class CommOverlapEntry:
    """A buffer of the registry: the name of its communicator, its parameters, how often it is held."""

    comm: str
    config: CommOverlapConfig
    holds: int


def comm_overlap_buffers() -> dict[int, CommOverlapEntry]:
    """All buffers that are alive, by number."""
    return {id: CommOverlapEntry(*entry) for id, entry in _C._comm_overlap_buffers().items()}


@dataclass
class CommOverlapHelper:
    """The parameters of a buffer, as a value: fill in, then `create(comm)`. None is the default of the method."""

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
        """Whether create() makes a buffer: the method is not NONE."""
        return self.method != CommOverlapMethod.NONE

    def create(self, comm: TorchComm) -> int:
        """The number of the buffer, or 0 where the method is NONE."""
        if not self.is_enabled:
            return 0
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return create_comm_overlap_buffer(comm, dtype=values.pop("buffer_dtype"), **values)
