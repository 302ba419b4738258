"""Gradients of weights that are added to `weight.main_grad`, a buffer that outlives the backward pass, as in Megatron.

The product itself adds them where it can; otherwise they are added after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def with_main_grad(parameter: Tensor, weight: Tensor) -> Tensor:
    """Returns `weight`, the local part of `parameter`, whose gradient will be added to `parameter.main_grad`.

    Whoever multiplies by it may add the gradient itself (see fusible()), and then returns none. `parameter.grad` stays
    None, unless the parameter has the attribute `grad_added_to_main_grad`: then that is set, and `.grad` gets a tensor
    of no meaning, for hooks that run only if there is one.
    """
    wrapped: Tensor = _MainGrad.apply(weight, parameter)  # type: ignore[no-untyped-call]
    return wrapped


def main_grad_of(who: str, parameter: Tensor) -> Tensor:
    """Returns this rank's main_grad of a parameter.

    Raises:
        ValueError: it has none, or one of another shape.
    """
    buffer = getattr(parameter, "main_grad", None)
    if not isinstance(buffer, Tensor) or buffer.shape != parameter.shape:
        got = "none" if buffer is None else f"{type(buffer).__name__} of shape {list(getattr(buffer, 'shape', ()))}"
        raise ValueError(f"{who}: expected weight.main_grad, a tensor of shape {list(parameter.shape)}, with "
                         f"gradient_accumulation_fusion, got {got}. Set it before the forward pass, for example to "
                         "torch.zeros_like(weight, dtype=torch.float32).")  # fmt: skip
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def fusible(x: Tensor, main_grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the buffers as `main_grads` of the operators on x; none if a product cannot add to them."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return []
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    allowed = (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)
    fits = all(buffer.dtype in allowed and buffer.device == x.device and buffer.is_contiguous()
               for buffer in main_grads)  # fmt: skip
    return list(main_grads) if fits else []


class _MainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        parameter = ctx.parameter
        if grad is not None:
            main_grad_of("gradient_accumulation_fusion", parameter).add_(grad)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None, None
        parameter.grad_added_to_main_grad = True
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        made = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
        return made(local), None
