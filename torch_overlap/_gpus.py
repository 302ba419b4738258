"""GPUs of the ranks of one host."""

from __future__ import annotations

import os

import torch

SHARED = 8


def gpu_ranks() -> int:
    """Returns the number of ranks of this host that can have a GPU.

    One rank per GPU; at least eight if NCCL_MULTI_RANK_GPU_ENABLE=1 makes NCCL (2.30) let ranks share a GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max(gpus, SHARED) if gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else gpus


def gpu_of(local_rank: int) -> torch.device:
    """Returns the GPU of a rank. Ranks are assigned to GPUs round-robin, as in new_comm."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())
