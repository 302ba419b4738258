"""broadcast: one rank's local tensor becomes that of all along some axes.

Shape stays. Layout: whole along the axes, and invariant. Gradient: the sum of all ranks' goes to the root, where it
counts once; zeros elsewhere. Cost: the tensor.
"""

from __future__ import annotations

import torch

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh._core import CostModel, wire_bytes
from torch_overlap.mesh.communication.base import Axes, CollectiveOperation, axis_names
from torch_overlap.mesh.sharded import Sharded, Spec

__all__ = ["BroadcastOp", "broadcast"]


class BroadcastOp(CollectiveOperation):
    """One rank's tensor for all; see broadcast."""

    name = "broadcast"

    def __call__(self, x: Sharded, root: int = 0, axes: Axes = None) -> Sharded:
        spec = self._spec(x)
        names = self._axes(spec, root, axes)
        comm = spec.mesh.group_comm(names)
        if comm is None:
            return x
        layout = spec.layout
        # Of an invariant result each rank has the whole gradient: only the root's may count.
        whole = layout.with_invariant([n for n in layout.invariant if n not in names])
        local = torch.ops.torch_overlap.broadcast(x.local, root, comm.get_name())
        from torch_overlap.mesh.sharded import spec_of

        return Sharded(local, spec_of(spec.mesh, whole, spec.shape, spec.dtype))._reshard(
            whole.with_invariant([*whole.invariant, *names])
        )

    def estimate_cost(self, x: Sharded, root: int = 0, axes: Axes = None, cost: CostModel | None = None) -> float:
        spec = self._spec(x)
        names = self._axes(spec, root, axes)
        size = float(x.local.numel() * x.element_size())
        return (cost or spec.mesh.cost).collective("broadcast", spec.mesh.mesh.links(names), size)

    def communication_cost(self, x: Sharded, root: int = 0, axes: Axes = None) -> float:
        spec = self._spec(x)
        count = len(spec.mesh.mesh.group(spec.mesh.rank, self._axes(spec, root, axes)))
        return wire_bytes("broadcast", count, float(x.local.numel() * x.element_size()))

    def _axes(self, spec: Spec, root: int, axes: Axes) -> list[str]:
        mesh, layout = spec.mesh.mesh, spec.layout
        used = {n.split(":")[0] for dim in layout.dims for n in dim} | {n.split(":")[0] for n in layout.partial}
        names = axis_names(self.name, mesh, axes) or [n for n in mesh.axes if n not in used]
        names.sort(key=list(mesh.axes).index)
        if used & set(names):
            raise InvalidValueError(
                f"{self.name}: expected axes along which local tensors are copies, got {sorted(used & set(names))} of "
                f"{spec.text}"
            )
        count = len(mesh.group(spec.mesh.rank, names))
        if not 0 <= root < count:
            raise InvalidValueError(f"{self.name}: expected a root below {count}, the ranks along {names}, got {root}")
        return names


_broadcast = BroadcastOp()


def broadcast(x: Sharded, root: int = 0, axes: Axes = None) -> Sharded:
    """The local tensor of the rank at place `root` along `axes`, on all of them.

    For values that should be the same along `axes` and are not yet, such as initial weights. Without `axes`: all along
    which `x` is whole. Along other axes each group has its own root.
    """
    return _broadcast(x, root, axes)


distributed_broadcast = broadcast
