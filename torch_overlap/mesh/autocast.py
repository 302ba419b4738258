"""torch.autocast for Sharded values: casts a function's arguments as autocast would, before the function is planned.

Products are cast to the lower precision, functions that lose accuracy in 16 bits to float32, on every device. The lists
follow CUDA's autocast. Other functions run in the dtypes of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["argument_dtype", "autocast_of"]

_LOWER = frozenset({
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum", "linear", "matmul", "mm", "mv",
    "prelu", "rmatmul", "scaled_dot_product_attention",
})  # fmt: skip
_FLOAT32 = frozenset({
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_similarity", "cross_entropy", "cumprod",
    "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "huber_loss", "kl_div", "l1_loss", "layer_norm",
    "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "mse_loss", "nll_loss", "norm", "normalize",
    "pow", "prod", "reciprocal", "rpow", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "tan", "vector_norm",
})  # fmt: skip


def autocast_of(device_type: str) -> torch.dtype | None:
    """Returns the dtype of an enabled autocast, or None."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def argument_dtype(func: Callable[..., Any], autocast: torch.dtype) -> torch.dtype | None:
    """Returns the dtype that the function's float arguments are cast to; None means no cast."""
    name = str(getattr(func, "__name__", "")).strip("_")
    if name in _LOWER:
        return autocast
    return torch.float32 if name in _FLOAT32 else None
