"""Parameters of layers that lie one after the other in memory, so that a product reads them as one.

Each stays a parameter with its own name and gradient. Whatever gives a parameter other memory (FSDP2, loading with
assign=True) only ends the joining: the layers then multiply by one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_overlap._C import _joined_memory

_PLAIN = (Tensor, nn.Parameter)


@torch.no_grad()
def _local(parameter: Tensor) -> Tensor:
    """Returns the tensor that has the memory of a parameter: of a DTensor, this rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def rejoin(parameters: Sequence[Tensor], mesh: DeviceMesh | None = None) -> None:
    """Moves parameters to common memory, unless they are there. They stay the same objects.

    Each gets a storage of its own: torch 2.11 cannot copy a DTensor whose local tensor begins inside its storage. Other
    parameters than plain ones, or DTensors of `mesh`, stay where they are: FSDP2 has addresses of its own.
    """
    if any(parameter.device_mesh != mesh for parameter in parameters if isinstance(parameter, DTensor)):
        return
    parts = [_local(parameter) for parameter in parameters]
    alike = len({(part.dtype, part.device, part.shape[1:]) for part in parts}) == 1
    if len(parts) < 2 or not alike or parts[0].is_meta or any(type(part) not in _PLAIN for part in parts):
        return
    if not are_joined(parts):
        places = torch.cat([part.detach() for part in parts]).split([part.size(0) for part in parts])
        for part, place in zip(parts, places, strict=True):
            part.data = _with_own_storage(place)


def _with_own_storage(part: Tensor) -> Tensor:
    """Returns a tensor of the same memory that begins where its storage does, as copies of a DTensor require."""
    try:
        own = _joined_memory([part]) if part.is_contiguous() else None
    except RuntimeError:  # a batch of vmap has no address
        return part
    return part if own is None else own  # None: it has no memory


def are_joined(parameters: Sequence[Tensor]) -> bool:
    """Returns True if parameters, plain or DTensors, lie one after the other in memory."""
    return _joined_memory([_local(parameter) for parameter in parameters]) is not None


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


class _Join(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: Tensor) -> Tensor:
        whole = _joined_memory(parts)
        assert whole is not None
        return whole

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
        if torch.is_grad_enabled():
            return parts
        return tuple(_with_own_storage(part) for part in parts)


def split_columns(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns parts of the last dimension that may be changed in place. Gradients that lie side by side in memory, as
    swiglu makes them, become that of the whole without a copy."""
    parts: tuple[Tensor, ...] = _Split.apply(whole, tuple(sizes))  # type: ignore[no-untyped-call]
    return list(parts)


class _Split(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(whole: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.unsafe_split_with_sizes(whole, sizes, -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = None if torch.is_grad_enabled() else _side_by_side(grads)
        return torch.cat(grads, -1) if whole is None else whole, None


def _side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor whose columns are these parts; None if they do not follow each other in memory."""
    first, place = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != place or part.stride() != first.stride() or part.stride(-1) != 1:
            return None
        place += part.size(-1)
    try:
        if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
            return None
    except RuntimeError:  # a batch of vmap has no address
        return None
    columns = sum(part.size(-1) for part in parts)
    return first.as_strided((*first.shape[:-1], columns), first.stride())
