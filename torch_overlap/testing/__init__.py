"""Tests over several ranks: `run_ranks` runs one function on every rank and returns the results."""

from torch_overlap._gpus import gpu_of, gpu_ranks
from torch_overlap.testing._ranks import run_ranks
from torch_overlap.testing._report import RanksFailed

__all__ = ["RanksFailed", "gpu_of", "gpu_ranks", "run_ranks"]
