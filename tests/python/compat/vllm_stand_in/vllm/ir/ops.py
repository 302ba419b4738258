"""RMSNorm as operators that stay whole until the passes have run."""

from __future__ import annotations

import stand_in_operators  # noqa: F401
import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return torch.ops.vllm_ir.rms_norm(x, weight, epsilon, variance_size)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)
