"""Parameters of one layer that lie one after the other in memory, so that a product reads them as one.

Each stays a parameter with its own name and gradient. Whatever gives a parameter other memory (FSDP2, loading with
assign=True) only ends the joining: the layer then multiplies by one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def rejoin(parameters: Sequence[nn.Parameter]) -> None:
    """Moves plain parameters to common memory, unless they are there. They stay the same objects.

    DTensors stay where they are: torch 2.11 cannot copy one whose local tensor begins inside its storage.
    """
    alike = len({(p.dtype, p.device, p.shape[1:]) for p in parameters}) == 1
    if len(parameters) < 2 or not alike or any(type(p) is not nn.Parameter for p in parameters):
        return
    if not are_joined(parameters):
        parts = torch.cat([p.detach() for p in parameters]).split([p.size(0) for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part


def are_joined(parts: Sequence[Tensor]) -> bool:
    """Returns True if the parts lie one after the other in one storage."""
    first = parts[0]
    if first.is_meta:
        return False
    dtype, tail, end = first.dtype, first.shape[1:], first.storage_offset()
    try:
        memory = first.untyped_storage().data_ptr()
        for part in parts:
            if (part.untyped_storage().data_ptr() != memory or part.storage_offset() != end or part.dtype != dtype
                    or part.shape[1:] != tail or not part.is_contiguous()):  # fmt: skip
                return False
            end += part.numel()
    except (NotImplementedError, RuntimeError):  # inside torch.func, whose tensors have no storage
        return False
    return True


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the concatenation of the parts along dimension 0 without a copy; None if they are not joined in memory.

    The gradient of each part is a slice of that of the result. None under torch.compile, which cannot see addresses.
    """
    if torch.compiler.is_compiling() or any(part is None or type(part) not in _PLAIN for part in parts):
        return None
    found: list[Tensor] = [part for part in parts if part is not None]
    if len(found) == 1:
        return found[0]
    if len({part.requires_grad for part in found}) > 1 or not are_joined(found):
        return None
    whole: Tensor = _Join.apply(*found)  # type: ignore[no-untyped-call]
    return whole


_PLAIN = (Tensor, nn.Parameter)


class _Join(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: Tensor) -> Tensor:
        first = parts[0]
        rows = sum(part.size(0) for part in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.sizes = [part.size(0) for part in inputs]
        if inputs[0].dim() > 1:  # for their versions: the result shares that of the first. A bias may change.
            ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if a part was changed in place
        if grad is None:  # it was added to main_grad
            return (None,) * len(ctx.sizes)
        parts: tuple[Tensor, ...] = grad.split(ctx.sizes)
        return parts
