"""The RMSNorm of transformer blocks, which also adds the residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ops = torch.ops.torch_overlap


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, which on a GPU computes its result and its gradients by one kernel each.

    Under torch.compile, which fuses torch's operators itself, under autocast and without an eps it is torch's own.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Returns the norm of x; with `residual` that of h = x + residual, and h."""
        operands = [x, self.weight] if residual is None else [x, self.weight, residual]
        if self.eps is not None and _has_operator(operands):
            norm, hidden = _ops.add_rms_norm(x, residual, self.weight, self.eps)
            return norm if residual is None else (norm, hidden)
        if residual is None:
            return super().forward(x)
        hidden = x + residual
        return super().forward(hidden), hidden


def _has_operator(operands: list[Tensor]) -> bool:
    """Returns True if the operator takes these operands: plain tensors of one dtype and torch computes in that."""
    if torch.compiler.is_compiling() or any(type(operand) not in (Tensor, nn.Parameter) for operand in operands):
        return False
    x = operands[0]
    return (
        x.is_floating_point()
        and not torch.is_autocast_enabled(x.device.type)
        and all(operand.dtype == x.dtype for operand in operands)
    )
