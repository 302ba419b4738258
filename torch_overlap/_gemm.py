"""The compiled products, under a name of their own; their types are in _gemm.pyi."""

from torch_overlap._C._gemm import *  # noqa: F403
