"""The GPUs that ranks of one machine have."""

from __future__ import annotations

import os

import torch

SHARED = 8


def gpu_ranks() -> int:
    """How many ranks of this machine can have a GPU.

    One each, or eight at least where NCCL (2.30) is told by NCCL_MULTI_RANK_GPU_ENABLE=1 to let them share one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max(gpus, SHARED) if gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else gpus


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank: its own while there are enough, as for new_comm."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())
