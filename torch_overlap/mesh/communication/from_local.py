"""from_local: a Sharded of the local tensors that the ranks have. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import InvalidValueError, MeshComms
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, expect_connected, layout_of, ranks_of, spec_of

__all__ = ["from_local"]


def from_local(local: Tensor, mesh: MeshComms, spec: Any, shape: Sequence[int] | None = None) -> Sharded:
    """Returns a Sharded of each rank's existing local tensor; nothing is sent.

    A `local` that requires a gradient continues to.

    Args:
        local: this rank's part.
        mesh: the connected mesh.
        spec: its layout, in any spelling.
        shape: the global shape; required if parts are uneven. Default: that of equal parts.

    Raises:
        InvalidValueError: `local` does not have the shape of this rank's part.
    """
    expect_connected("from_local", mesh)
    return Sharded(local, as_dynamo_constant(_spec_of_local, local.shape, local.dtype, mesh, spec, shape))


def _spec_of_local(
    local: Sequence[int], dtype: torch.dtype, mesh: MeshComms, spec: Any, shape: Sequence[int] | None
) -> ValueSpec:
    layout = layout_of(spec, mesh, len(local))
    if shape is None:
        shape = [n * ranks_of(layout.mesh, axes) for n, axes in zip(local, layout.dims, strict=True)]
    expected = layout.local_shape(shape, mesh.rank)
    if tuple(local) != expected:
        raise InvalidValueError(
            f"from_local: expected {expected}, this rank's part of {tuple(shape)} under {layout}, got "
            f"{tuple(local)}; give the global shape"
        )
    return spec_of(mesh, layout, shape, dtype)
