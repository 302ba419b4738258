"""Sizes up to which calls of vLLM are served: those for which our kernels run rather than NCCL.

They follow the table in csrc/torch_overlap/collectives/select.cpp. Larger calls are left to vLLM, which has
implementations besides NCCL for some of them.
"""

from __future__ import annotations

__all__ = ["MAX_RANKS", "max_fused_tokens", "max_served_bytes"]

_KI, _MI = 1024, 1024 * 1024

# Our kernels run in groups of up to 8 ranks.
MAX_RANKS = 8
# operation -> for groups of up to 2, 4 and 8 ranks: the maximum number of bytes of one rank's part
_MAX_BYTES = {
    "all_reduce": (16 * _MI, 16 * _MI, _MI),
    "all_gather": (16 * _MI, 32 * _MI, 256 * _KI),
    "reduce_scatter": (16 * _MI, 32 * _MI, 256 * _KI),
    "all_reduce_rms_norm": (2 * _MI, 512 * _KI, 256 * _KI),
}


def max_served_bytes(operation: str, num_ranks: int) -> int:
    """Returns the number of bytes of one rank's part up to which a call is served; 0 for a group of unsupported size.

    Args:
        operation: "all_reduce", "all_gather", "reduce_scatter" or "all_reduce_rms_norm".
        num_ranks: size of the group.
    """
    if not 2 <= num_ranks <= MAX_RANKS:
        return 0
    return _MAX_BYTES[operation][0 if num_ranks == 2 else 1 if num_ranks <= 4 else 2]


def max_fused_tokens(num_ranks: int, hidden_size: int, element_bytes: int) -> int:
    """Returns the number of rows up to which all-reduce and norm are fused.

    Args:
        num_ranks: size of the tensor-parallel group.
        hidden_size: elements of a row.
        element_bytes: bytes of an element.
    """
    return max_served_bytes("all_reduce_rms_norm", num_ranks) // (hidden_size * element_bytes)
