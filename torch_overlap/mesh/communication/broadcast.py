"""broadcast: one rank's local tensor becomes that of all along some axes.

Shape stays. Layout: whole along the axes, and invariant. Gradient: that of the result; of a replicated operand, whose
gradient is pending, on the root, and zeros elsewhere. Cost: the tensor.
"""

from __future__ import annotations

import torch

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Axes, LocalOperation, axis_names, in_mesh_order
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.tracing import asked
from torch_overlap.mesh.value_spec import Spec, spec_of, used_axes

__all__ = ["BroadcastOp", "broadcast"]


class BroadcastOp(LocalOperation):
    """One rank's tensor for all; see broadcast."""

    name = collective = "broadcast"

    def __call__(self, x: Sharded, root: int = 0, axes: Axes = None) -> Sharded:
        spec = self._spec(x)
        how = asked(_group, spec, root, axes)
        if how is None:
            return x
        comm, replicated, target = how
        local = torch.ops.torch_overlap.broadcast(x._to(replicated).local, root, comm)
        return Sharded(local, replicated)._to(target)

    def group(self, spec: Spec, root: int = 0, axes: Axes = None) -> list[str]:
        mesh, differ = spec.mesh.mesh, used_axes(spec.layout)
        names = axis_names(self.name, mesh, axes) or [n for n in mesh.axes if n not in differ]
        if differ & set(names):
            raise InvalidValueError(
                f"broadcast: expected axes along which local tensors are copies, got {sorted(differ & set(names))} of "
                f"{spec.text}"
            )
        count = len(mesh.group(spec.mesh.rank, names))
        if not 0 <= root < count:
            raise InvalidValueError(f"broadcast: expected a root below {count}, the ranks along {names}, got {root}")
        return in_mesh_order(mesh, names)


def _group(spec: Spec, root: int, axes: Axes) -> tuple[str, Spec, Spec] | None:
    """The communicator, what comes from it and what that becomes.

    The operator sums all gradients for the root: operand and result are replicated. Of an invariant result, each
    gradient of which is the whole, one rank's counts; an invariant operand gets that of the root on every rank.
    """
    names = BroadcastOp().group(spec, root, axes)
    comm = spec.mesh.group_comm(names)
    if comm is None:
        return None
    plain = spec.layout.with_invariant([n for n in spec.layout.invariant if n not in names])
    whole = plain.with_invariant([*plain.invariant, *names])
    known = (spec.shape, spec.dtype)
    return comm.get_name(), spec_of(spec.mesh, plain, *known), spec_of(spec.mesh, whole, *known)


_broadcast = BroadcastOp()


def broadcast(x: Sharded, root: int = 0, axes: Axes = None) -> Sharded:
    """The local tensor of the rank at place `root` along `axes`, on all of them.

    For values that should be the same along `axes` and are not yet, such as initial weights. Without `axes`: all along
    which `x` is whole. Along other axes each group has its own root.
    """
    return _broadcast(x, root, axes)
