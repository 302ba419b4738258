"""Converts local tensors of a connected mesh from one layout to another.

Layouts are text, as from str(Layout): "[dp],[tp] P{cp} I{ep}"; `mesh` is the name of a mesh from
`torch_overlap.mesh.connect`. Composed of the collectives above: autograd, torch.vmap and compilers see those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import MeshComms

__all__ = ["reshard"]

_ops = torch.ops.torch_overlap


def reshard(x: Tensor, mesh: MeshComms, from_layout: str, to_layout: str, shape: Sequence[int]) -> Tensor:
    """Returns this rank's part of a tensor under another layout, by the cheapest plan (`mesh.plan`).

    Args:
        x: this rank's part under `from_layout`. Uneven parts are cut as in torch.chunk, and are padded for transfer.
        mesh: the connected mesh.
        from_layout: the layout of `x`, as text.
        to_layout: the layout of the result, as text.
        shape: of the whole tensor.

    Returns: a tensor that may share memory with `x` if nothing is sent.

    Gradient: a value that is replicated, sharded, partial or invariant (R, S, P, I) along an axis has a gradient that
    is partial, sharded, replicated or invariant. Only for the reductions sum and avg.
    """
    return _ops.reshard(x, mesh.name, from_layout, to_layout, shape)
