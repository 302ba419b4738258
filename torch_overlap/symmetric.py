"""Symmetric memory: memory that the other ranks of a host can map, for windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_overlap import _C
from torch_overlap._C import TorchComm
from torch_overlap._load import LIBRARY

__all__ = ["get_mem_allocator", "symmetric_empty"]


def symmetric_empty(shape: int | Sequence[int], dtype: torch.dtype | None, comm: TorchComm) -> torch.Tensor:
    """Returns a tensor of zeros on the communicator's device that `comm.new_window` accepts, as do its views.

    No communication. CPU: anonymous shared memory, so nothing is left of it when a process is killed. CUDA: a dedicated
    allocation, in multiples of 2 MiB; for many small tensors use a `torch.cuda.MemPool` over `get_mem_allocator`. It is
    not an inference tensor, even under torch.inference_mode: it may be written in any mode.

    Args:
        shape: a number, or a sequence of numbers.
        dtype: None means torch's default.
        comm: the communicator.

    Raises:
        UnsupportedError: the communicator's backend has no windows on its device.
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if comm.get_backend() == "fake":  # no peer maps it
        with torch.inference_mode(False):
            return torch.zeros(sizes, dtype=dtype, device=comm.get_device())
    return _C._symmetric_empty(sizes, dtype or torch.get_default_dtype(), comm.get_device())


def get_mem_allocator(backend: str) -> Any:
    """Returns the allocator for a `torch.cuda.MemPool` whose tensors `new_window` accepts.

    It is also that of `comm.get_mem_allocator()`.

        pool = torch.cuda.MemPool(torch_overlap.get_mem_allocator("nccl"))
        with torch.cuda.use_mem_pool(pool):
            x = torch.zeros(1024, device="cuda")
        window = comm.new_window(x)

    Args:
        backend: "nccl" or "ncclx".

    Raises:
        UnsupportedError: the backend's tensors are not on CUDA devices; use `symmetric_empty`.
    """
    if backend.lower() not in ("nccl", "ncclx") or backend.lower() not in _C.built_backends():
        raise _C.UnsupportedError(
            f"get_mem_allocator: expected a backend of CUDA devices that is built, got {backend!r}; "
            "use torch_overlap.symmetric_empty"
        )
    return _cuda_allocator().allocator()


@functools.cache
def _cuda_allocator() -> Any:
    """Returns the process-wide allocator: torch separates the pools of different allocators."""
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(str(LIBRARY), "torch_overlap_symmetric_alloc", "torch_overlap_symmetric_free")
