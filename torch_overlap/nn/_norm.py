"""The RMSNorm of transformer blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ops = torch.ops.torch_overlap


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, which on a GPU computes its result by one kernel and its gradients by two.

    Under torch.compile, which fuses torch's operators itself, under autocast and without an eps it is torch's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.eps is None or torch.compiler.is_compiling() or not _has_operator(x, self.weight):
            return super().forward(x)
        norm: Tensor = _ops.add_rms_norm(x, None, self.weight, self.eps)[0]
        return norm


def _has_operator(x: Tensor, weight: Tensor | None) -> bool:
    """Returns True if the operator takes these operands: plain tensors of one dtype, in which torch computes."""
    if any(type(operand) not in (Tensor, nn.Parameter) for operand in (x, weight)) or weight is None:
        return False
    return x.is_floating_point() and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
