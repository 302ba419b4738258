"""Checkpoints that fit any number of ranks. `module.state_dict()` itself has this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_overlap import ops
from torch_overlap._C import TorchComm
from torch_overlap.nn.layout import layouts


def _splits(module: nn.Module) -> dict[str, tuple[TorchComm, int]]:
    """Key in the state dict -> communicator and dimension, for what is split."""
    return {f"{prefix}.{name}".lstrip("."): (layout.comm, dim)
            for prefix, _, layout in layouts(module) for name, dim in layout.split.items()}  # fmt: skip


@torch.no_grad()
def full_state_dict(module: nn.Module, *, offload_to_cpu: bool = False) -> dict[str, Any]:
    """`module.state_dict()` with every split parameter gathered: the same keys, whole tensors, on every rank.

    Collective over the communicators of the layers. The keys of a layer with one output are those of nn.Linear, so the
    result loads into the unsharded model. Gathered tensors are new; the others are those of state_dict().

    Args:
        offload_to_cpu: move each tensor to the CPU before the next is gathered.
    """
    splits = _splits(module)
    full: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        if key in splits:
            comm, dim = splits[key]
            value = ops.all_gather(value, comm, dim)
        full[key] = value.cpu() if offload_to_cpu and isinstance(value, Tensor) else value
    return full


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads what `full_state_dict`, or the unsharded model, gave: each rank takes its parts. Sends nothing.

    Returns: what `module.load_state_dict` does.

    Raises:
        ValueError: a tensor's split dimension is not that of the whole parameter.
        RuntimeError: as from `module.load_state_dict`.
    """
    parts = dict(state)
    own = module.state_dict()
    for key, (comm, dim) in _splits(module).items():
        if key not in parts or key not in own:
            continue
        size, whole = comm.get_size(), parts[key]
        shape = [n * size if i == dim else n for i, n in enumerate(own[key].shape)]
        if list(whole.shape) != shape:
            raise ValueError(f"load_full_state_dict: expected '{key}' of shape {shape}, got {list(whole.shape)}; a "
                             "shard loads by module.load_state_dict")  # fmt: skip
        parts[key] = whole.chunk(size, dim)[comm.get_rank()]
    return module.load_state_dict(parts, strict=strict)
