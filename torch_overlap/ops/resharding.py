"""Local tensors of a connected mesh, from one layout to another.

Layouts are words, as str(Layout) gives them: "[dp],[tp] P{cp} I{ep}"; `mesh` is the name of what
`torch_overlap.mesh.connect` made. Made of the collectives above: autograd, torch.vmap and compilers see those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import MeshComms

__all__ = ["reshard"]

_ops = torch.ops.torch_overlap


def reshard(x: Tensor, mesh: MeshComms, from_layout: str, to_layout: str, shape: Sequence[int]) -> Tensor:
    """This rank's part of a tensor under another layout, by the cheapest plan (`mesh.plan`).

    Args:
        x: its part under `from_layout`. Uneven parts are as torch.chunk cuts, and are padded on the wire.
        shape: of the whole tensor.

    Returns: a tensor that may share memory with `x`, where nothing is sent.

    Gradient: a value that is replicated, sharded, pending or invariant (R, S, P, I) along an axis has a gradient that
    is pending, sharded, replicated, invariant; not for reductions but sum and avg.
    """
    return _ops.reshard(x, mesh.name, from_layout, to_layout, shape)
