"""SHARES_GPU: True if ranks of the tests share a GPU."""

import torch

from torch_overlap.testing import gpu_ranks

SHARES_GPU = gpu_ranks() > torch.cuda.device_count()
