"""Tests over several ranks: `run_ranks` runs one function on every rank and returns the results."""

import torch

from torch_overlap._gpus import gpu_of, gpu_ranks
from torch_overlap.testing._ranks import run_ranks
from torch_overlap.testing._report import RanksFailed

__all__ = ["RanksFailed", "gpu_of", "gpu_ranks", "run_ranks", "torch_is_before"]


def torch_is_before(version: str) -> bool:
    """Returns True if the installed torch is older, as by `torch_is_before("2.15")`."""
    parts = str(torch.__version__).split(".")[:2]
    return [int(part) for part in parts] < [int(part) for part in version.split(".")]
