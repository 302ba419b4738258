"""The RMSNorm of transformer blocks, which also adds the residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

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


def takes_residual(norm: nn.Module) -> bool:
    """Returns True if `norm` may be called with a residual, and then returns two tensors.

    Hooks and a patched forward are written for the argument and the result of nn.RMSNorm. Compilers fuse the sum
    themselves.
    """
    if torch.compiler.is_compiling() or not isinstance(norm, RMSNorm) or "forward" in vars(norm):
        return False
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return not any(hooks) and not _has_any_global_hook()


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
