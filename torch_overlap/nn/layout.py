"""Records which parameters of a module are split over a communicator, and which have gradients to be summed over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_overlap import ops
from torch_overlap._C import TorchComm

_ATTRIBUTE = "_parameter_layout"


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of a module's own parameters (not those of its children) on the ranks of `comm`.

    It belongs to the module rather than to its parameters, so it survives `to_empty`, `copy.deepcopy` and new
    parameters.
    """

    comm: TorchComm
    split: Mapping[str, int] = field(default_factory=dict)  # name -> the dimension that is split over the ranks
    partial: frozenset[str] = frozenset()  # whole on every rank, with the gradient of this rank's rows only


def set_layout(module: nn.Module, layout: ParameterLayout) -> None:
    setattr(module, _ATTRIBUTE, layout)


def layouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, ParameterLayout]]:
    """Yields name, module and layout of `module` and all its descendants that have one."""
    for name, child in module.named_modules(remove_duplicate=False):
        layout = getattr(child, _ATTRIBUTE, None)
        if isinstance(layout, ParameterLayout):
            yield name, child, layout


def mark_replicated(module: nn.Module, comm: TorchComm) -> None:
    """Declares that `module` works on this rank's rows with parameters that every rank of `comm` holds in full.

    For norms, embeddings and heads of a sequence-parallel model: `sync_replicated_grads` then completes the gradients
    of the current parameters of `module` and its children, except those of layers of torch_overlap.nn in it.

    Args:
        module: the module, after its parameters are made.
        comm: the communicator whose ranks share the rows.
    """
    done = {id(child) for _, child, _ in layouts(module)}
    for child in module.modules():
        names = frozenset(name for name, _ in child.named_parameters(recurse=False))
        if names and id(child) not in done:
            set_layout(child, ParameterLayout(comm, partial=names))


def split_parameters(module: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """Returns name -> (this rank's shard, the split dimension), for every split parameter in `module`."""
    found = {}
    for prefix, child, layout in layouts(module):
        own = dict(child.named_parameters(recurse=False))
        for name, dim in layout.split.items():
            if name in own:
                found[f"{prefix}.{name}".lstrip(".")] = own[name], dim
    return found


@torch.no_grad()
def sync_replicated_grads(module: nn.Module, comm: TorchComm | None = None) -> None:
    """Sums over the ranks the gradients that each rank has for its own rows only. Collective; call it after backward.

    Under sequence parallelism these are the norms (see `mark_replicated`) and the biases of row-parallel layers.
    Parameters without a gradient are skipped: the same parameters must have one on all ranks. Call it once for each
    optimizer step, when gradients have been accumulated and before they are clipped. Makes one all_reduce for each
    dtype, on the current stream; may be captured in a CUDA graph. For DTensor gradients of FSDP2 over another axis,
    this rank's parts are summed.

    Args:
        module: the module with the parameters.
        comm: only the parameters that belong to this communicator; None: all, each over its own.
    """
    buckets: dict[tuple[int, torch.dtype, torch.device], tuple[TorchComm, list[Tensor]]] = {}
    seen: set[int] = set()
    for _, child, layout in layouts(module):
        if comm is not None and layout.comm.get_name() != comm.get_name():
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if name not in layout.partial or parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad = parameter.grad
            if isinstance(grad, DTensor):  # from FSDP2: along the other axis the ranks of comm have the same part
                grad = grad.to_local()
            key = (id(layout.comm), grad.dtype, grad.device)
            buckets.setdefault(key, (layout.comm, []))[1].append(grad)
    for group, grads in buckets.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        ops.all_reduce_(flat, group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
