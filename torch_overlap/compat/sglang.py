"""A platform plug-in for SGLang: its process groups are of the backend "torch_overlap".

SGLang's platform names the torch.distributed backend and nothing else of the communication: its custom all-reduce and
its fused norms have no slot that a package could fill without replacing functions of SGLang. So collectives that SGLang
leaves to torch.distributed are ours, and the others are not. The entry point is in `torch_overlap_sglang`.
"""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    raise ImportError(
        "torch_overlap.compat.sglang: expected SGLang to be installed, got none. "
        "Run: pip install 'torch_overlap[sglang]'"
    )

from sglang.srt.platforms.cuda import CudaSRTPlatform

from torch_overlap._c10d import BACKEND_NAME

__all__ = ["OverlapPlatform"]


class OverlapPlatform(CudaSRTPlatform):  # type: ignore[misc]
    """SGLang's CUDA platform, with process groups of the backend "torch_overlap"."""

    def get_torch_distributed_backend_str(self) -> str:
        """Returns the name of the torch.distributed backend for SGLang's process groups."""
        return BACKEND_NAME
