"""The RMSNorm of transformer blocks, which also adds the residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ops = torch.ops.torch_overlap


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, which on a GPU computes its result and its gradients by one kernel each.

    Under torch.compile, which fuses torch's operators itself, and under autocast it is torch's own.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Returns the norm of x; with `residual` that of h = x + residual, and h."""
        parts = (x, self.weight) if residual is None else (x, self.weight, residual)
        if self.eps is not None and _have_operator(parts):
            norm, hidden = _ops.add_rms_norm(x, residual, self.weight, self.eps)
            return norm if residual is None else (norm, hidden)
        if residual is None:
            return super().forward(x)
        hidden = x + residual
        return super().forward(hidden), hidden


def _have_operator(parts: tuple[Tensor | None, ...]) -> bool:
    if torch.compiler.is_compiling() or parts[1] is None:
        return False
    first = parts[0]
    assert first is not None
    if torch.is_autocast_enabled(first.device.type) or not first.is_floating_point() or first.dim() == 0:
        return False
    return all(type(part) in (Tensor, nn.Parameter) and part.dtype == first.dtype for part in parts)
