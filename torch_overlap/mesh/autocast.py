"""torch.autocast for Sharded values: casts a function's arguments as autocast would, before the function is planned.

Products are cast to the lower precision, functions that lose accuracy in 16 bits to float32, on every device; some need
inputs of one dtype. The lists follow CUDA's autocast. Other functions run in the dtypes of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

__all__ = ["argument_dtype", "autocast_of"]

_LOWER = frozenset({
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum", "linear", "matmul", "mm", "multi_dot", "mv",
    "prelu", "rmatmul", "scaled_dot_product_attention", "vecdot",
})  # fmt: skip
_FLOAT32 = frozenset({
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "frobenius_norm", "group_norm",
    "hinge_embedding_loss", "huber_loss", "interpolate", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p",
    "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "matrix_norm", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "norm", "normalize", "nuclear_norm", "pdist", "poisson_nll_loss", "pow",
    "prod", "reciprocal", "renorm", "rpow", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "tan", "triplet_margin_loss", "upsample", "vector_norm",
})  # fmt: skip
# Functions whose inputs are cast to float32 if some of them are and others have 16 bits.
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sample", "index_put", "inner", "scatter_add",
    "tensordot", "vdot",
})  # fmt: skip


def autocast_of(device_type: str) -> torch.dtype | None:
    """Returns the dtype of an enabled autocast, or None."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def argument_dtype(
    func: Callable[..., Any], autocast: torch.dtype, dtypes: Collection[torch.dtype]
) -> torch.dtype | None:
    """Returns the dtype that the function's float arguments are cast to; None: no cast. `dtypes`: of all inputs."""
    name = str(getattr(func, "__name__", "")).strip("_").removeprefix("special_").removeprefix("linalg_")
    if name in _LOWER:
        return autocast
    is_mixed = name in _WIDEST and len({dtype for dtype in dtypes if dtype.is_floating_point}) > 1
    return torch.float32 if name in _FLOAT32 or is_mixed else None
