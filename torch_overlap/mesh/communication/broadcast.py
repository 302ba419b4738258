"""broadcast: copies one rank's local tensor to all ranks along some axes.

The shape is unchanged. Layout: whole along the axes, and invariant. Gradient: that of the result; for a replicated
operand, whose gradient is partial, that of the result on the root and zeros elsewhere. Cost: the tensor.
"""

from __future__ import annotations

import torch

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Axes, axis_names, in_mesh_order, sharded_spec
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, spec_of, used_axes

__all__ = ["broadcast"]


def broadcast_axes(spec: ValueSpec, root: int = 0, axes: Axes = None) -> list[str]:
    """Checks the arguments of broadcast and returns the names of the axes, in mesh order."""
    mesh, differ = spec.mesh.mesh, used_axes(spec.layout)
    names = axis_names("broadcast", mesh, axes) or [n for n in mesh.axes if n not in differ]
    if differ & set(names):
        raise InvalidValueError(
            f"broadcast: expected axes along which local tensors are copies, got {sorted(differ & set(names))} of "
            f"{spec.text}"
        )
    count = len(mesh.group(spec.mesh.rank, names))
    if not 0 <= root < count:
        raise InvalidValueError(f"broadcast: expected a root below {count}, the ranks along {names}, got {root}")
    return in_mesh_order(mesh, names)


def _group(spec: ValueSpec, root: int, axes: Axes) -> tuple[str, ValueSpec, ValueSpec] | None:
    """Returns the communicator, the ValueSpec of the operand and that of the result.

    The operator sums all gradients at the root, which is right for a replicated operand and result. The gradients of an
    invariant result are each the whole gradient, so one rank's counts; an invariant operand gets that of the root on
    every rank.
    """
    names = broadcast_axes(spec, root, axes)
    comm = spec.mesh.group_comm(names)
    if comm is None:
        return None
    plain = spec.layout.with_invariant([n for n in spec.layout.invariant if n not in names])
    whole = plain.with_invariant([*plain.invariant, *names])
    known = (spec.shape, spec.dtype)
    return comm.get_name(), spec_of(spec.mesh, plain, *known), spec_of(spec.mesh, whole, *known)


def broadcast(x: Sharded, root: int = 0, axes: Axes = None) -> Sharded:
    """Copies the local tensor of the rank at position `root` along `axes` to all of them.

    Use it for values that should be equal along `axes` but are not yet, such as initial weights. Default for `axes`:
    all along which `x` is whole. Along other axes each group has its own root.
    """
    how = as_dynamo_constant(_group, sharded_spec("broadcast", x), root, axes)
    if how is None:
        return x
    comm, replicated, target = how
    local = torch.ops.torch_overlap.broadcast(x._move_to(replicated).local, root, comm)
    return Sharded(local, replicated)._move_to(target)
