"""DTensor's local parts, with gradients of every order: those of torch 2.11 drop the gradients of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_overlap._C import UnsupportedError

__all__ = ["from_local", "to_local"]


def to_local(whole: DTensor) -> Tensor:
    """Returns the local part of a DTensor. Its gradient has the placements of the whole, Replicate for Partial."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        part: Tensor = whole.to_local(grad_placements=_of_gradient(whole.placements))
        return part
    return _ToLocal.apply(whole)  # type: ignore[no-any-return, no-untyped-call]


def from_local(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Returns the DTensor of a contiguous tensor of `shape` whose local part is `part`. Sends nothing."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _from_local(part, mesh, placements, shape)
    return _FromLocal.apply(part, mesh, tuple(placements), shape)  # type: ignore[no-any-return, no-untyped-call]


def _from_local(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _of_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Returns the placements of the gradient of a value: that of a partial one is whole on every rank."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def _checked_gradient(placements: Sequence[Placement], grad: Tensor) -> Tensor:
    """Returns a gradient of a value with these placements."""

    def refuse(_: Tensor) -> NoReturn:
        raise UnsupportedError("DTensor: expected no Partial placement where a gradient of a gradient is asked, got "
                               f"{tuple(placements)}; redistribute the value first")  # fmt: skip

    # The gradient of a whole gradient would be partial.
    if grad.requires_grad and any(isinstance(placement, Partial) for placement in placements):
        grad.register_hook(refuse)
    return grad


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = whole.device_mesh, whole.placements, whole.shape
        part = whole.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = from_local(grad, ctx.mesh, _of_gradient(ctx.placements), ctx.shape)
        return _checked_gradient(ctx.placements, whole)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
    ) -> DTensor:
        ctx.mesh, ctx.placements = mesh, placements
        return _from_local(part.detach(), mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        part = to_local(grad.redistribute(ctx.mesh, _of_gradient(ctx.placements)))
        return _checked_gradient(ctx.placements, part), None, None, None
