"""Gradients of weights that are added to `weight.main_grad`, a buffer that outlives the backward pass, as in Megatron.

The product itself adds them where it can; otherwise they are added after it. The forward pass decides: the buffer that
the parameter had then gets the gradient, also if the parameter gets another one, or is frozen, before the backward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_overlap._C import UnsupportedError


def with_main_grad(parameter: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
    """Returns `weight`, the local part of `parameter`, whose gradient will be added to `main_grad`.

    Whoever multiplies by it may add the gradient itself (see fusible()), and then returns none. `parameter.grad` stays
    None, unless the parameter has the attribute `grad_added_to_main_grad`: then that is set, and `.grad` gets a tensor
    of no meaning, for hooks that run only if there is one.
    """
    wrapped: Tensor = _MainGrad.apply(weight, parameter, main_grad)  # type: ignore[no-untyped-call]
    return wrapped


def main_grad_of(who: str, parameter: Tensor) -> Tensor:
    """Returns this rank's main_grad of a parameter.

    Raises:
        ValueError: it has none, or one of another shape, device or layout, or one that requires a gradient.
    """
    buffer = getattr(parameter, "main_grad", None)
    if not isinstance(buffer, Tensor) or not _is_alike(buffer, parameter):
        got = "none" if buffer is None else type(buffer).__name__
        if isinstance(buffer, Tensor):
            needs = ", which requires a gradient" if buffer.requires_grad else ""
            got += f" of shape {list(buffer.shape)}, {buffer.dtype} on {buffer.device}{needs}"
        kind = "DTensor of its placements and" if isinstance(parameter, DTensor) else "tensor of"
        raise ValueError(f"{who}: expected weight.main_grad, a {kind} shape {list(parameter.shape)} on "
                         f"{parameter.device}, with gradient_accumulation_fusion, got {got}. Set it before the forward "
                         "pass, for example to torch.zeros_like(weight.detach(), dtype=torch.float32). FSDP2, which "
                         "computes with other parameters, is not supported.")  # fmt: skip
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _is_alike(buffer: Tensor, parameter: Tensor) -> bool:
    if isinstance(buffer, DTensor) != isinstance(parameter, DTensor):
        return False
    if isinstance(buffer, DTensor) and isinstance(parameter, DTensor) and buffer.placements != parameter.placements:
        return False
    return (buffer.shape == parameter.shape and buffer.device == parameter.device and buffer.is_floating_point()
            and not buffer.requires_grad)  # fmt: skip


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
    def forward(ctx: Any, weight: Tensor, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.parameter, ctx.main_grad = parameter, main_grad
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        parameter = ctx.parameter
        if grad is not None:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "gradient_accumulation_fusion: expected a backward pass without create_graph=True, got one with "
                    "it. Ask for the gradients of other tensors alone, or make the layer without the option."
                )
            ctx.main_grad.add_(grad)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None, None, None
        parameter.grad_added_to_main_grad = True
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        needs_zeros = getattr(parameter, "zero_out_wgrad", False) or torch.is_anomaly_check_nan_enabled()
        made = torch.zeros_like if needs_zeros else torch.empty_like
        return made(local), None, None
