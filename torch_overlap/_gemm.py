"""The compiled products under a module name of their own. Their types are in _gemm.pyi."""

from torch_overlap._C._gemm import *  # noqa: F403
