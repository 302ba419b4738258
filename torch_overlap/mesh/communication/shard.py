"""shard: places a tensor on a mesh.

Shape: the global one is unchanged. Layout: the requested one. Gradient: for a plain tensor, which is the same on every
rank, the whole gradient on every rank. Cost: nothing is sent for a plain tensor; for a Sharded that of reshard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.distributed.tensor import DTensor

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.communication.base import Move, run_move
from torch_overlap.mesh.dynamo import as_dynamo_constant, is_dynamo_compiling
from torch_overlap.mesh.sharded import Provenance, Sharded
from torch_overlap.mesh.value_spec import (
    ValueSpec,
    expect_connected,
    layout_of,
    replicated_spec,
    spec_of,
    with_invariant_rest,
)

__all__ = ["part_of", "shard"]


def shard_move(spec: ValueSpec, to: Any = None, replicated_axes: Iterable[str] = (),
               partial_sum_axes: Iterable[str] = ()) -> Move:  # fmt: skip
    """Returns the definition of shard for an operand of this ValueSpec."""
    layout = layout_of(to, spec.mesh, len(spec.shape))
    pending, whole = sorted(partial_sum_axes), set(replicated_axes)
    if pending or whole:
        used = {n for dim in layout.dims for n in dim} & (whole | set(pending))
        if used or whole & set(pending):
            raise InvalidValueError(
                f"shard: expected axes that are one of sharded, replicated and partial, got {layout} with "
                f"replicated {sorted(whole)} and partial {pending}"
            )
        layout = with_invariant_rest(Layout(layout.mesh, layout.dims, pending))
    return Move(spec.layout, layout, tuple(spec.shape))


def shard(x: Tensor | Sharded, mesh: MeshComms, spec: Any = None, replicated_axes: Iterable[str] = (),
          partial_sum_axes: Iterable[str] = ()) -> Sharded:  # fmt: skip
    """Returns `x` as a Sharded on `mesh`.

        w = shard(w, mesh, P(None, "tp"))

    A plain tensor is the whole one, the same on every rank. Each rank copies its part, for any layout: the result
    shares no memory with `x`, and nothing is sent. `from_local` copies nothing: it takes ownership of a tensor, which
    for `P()` is the whole one. A Sharded is resharded.

    If `x` requires a gradient, the result is differentiable with respect to it and is not a leaf. For a parameter of
    which only the part is kept, shard under no_grad and call `requires_grad_()`.

    Args:
        x: the whole tensor, or a Sharded on `mesh`.
        mesh: the connected mesh.
        spec: any spelling of a layout: P("dp", None), a ShardingSpec, entries or DimSpecs, text. Axes that it omits are
            invariant (the same on every rank, and so is the gradient), unless it is a Layout.
        replicated_axes: Axes that must stay whole: an error if `spec` uses them.
        partial_sum_axes: Axes along which the result is a partial sum: the value on the first rank, zeros elsewhere.

    Raises:
        InvalidTypeError: `x` is not a tensor, or is on another device than the mesh; the mesh has no communicators.
        InvalidValueError: a Sharded of another mesh.
    """
    expect_connected("shard", mesh)
    if isinstance(x, Sharded):
        if x.mesh is not mesh:
            raise InvalidValueError(f"shard: expected a Sharded on {mesh}, got one on {x.mesh}; gather it first")
        return run_move("shard", shard_move, x, spec, replicated_axes, partial_sum_axes)
    if not isinstance(x, Tensor):
        raise InvalidTypeError(f"shard: expected a tensor, got {type(x).__name__}")
    if isinstance(x, DTensor):
        raise InvalidTypeError("shard: expected a plain tensor or a Sharded, got a DTensor; from_dtensor takes it")
    if is_dynamo_compiling():
        source, target = as_dynamo_constant(
            _ends_of_whole, x.shape, x.dtype, mesh, spec, replicated_axes, partial_sum_axes
        )
        return Sharded(Sharded(x, source)._move_to(target).local.clone(), target)
    out = part_of(x, mesh, spec, replicated_axes, partial_sum_axes)
    local = out.local
    if not is_batchedtensor(local) and local.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        out.local = local.clone()
    return out


def part_of(x: Tensor, mesh: MeshComms, spec: Any = None, replicated_axes: Iterable[str] = (),
            partial_sum_axes: Iterable[str] = ()) -> Sharded:  # fmt: skip
    """Like `shard` for a plain tensor, but takes ownership of it: the local tensor may be `x`, or a view of it."""
    if x.device.type != mesh.comm.get_device().type:
        raise InvalidTypeError(f"shard: expected a tensor on {mesh.comm.get_device()}, got one on {x.device}")
    whole = Sharded(x, replicated_spec(mesh, x.shape, x.dtype))
    out = run_move("shard", shard_move, whole, spec, replicated_axes, partial_sum_axes)
    out._provenance = Provenance.CALLER
    return out


def _ends_of_whole(
    shape: Any, dtype: Any, mesh: MeshComms, to: Any, *axes: Iterable[str]
) -> tuple[ValueSpec, ValueSpec]:
    spec = replicated_spec(mesh, shape, dtype)
    return spec, spec_of(mesh, shard_move(spec, to, *axes).target, shape, dtype)
