"""ppermute: local tensors change places.

Shape and layout stay. Gradient: the way back. Cost: a rank's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh._core import CostModel, wire_bytes
from torch_overlap.mesh.communication.base import Axes, CollectiveOperation, axis_names
from torch_overlap.mesh.sharded import Sharded, Spec

__all__ = ["PPermuteOp", "ppermute"]


class PPermuteOp(CollectiveOperation):
    """Local tensors change places; see ppermute."""

    name = "ppermute"

    def __call__(self, x: Sharded, permutation: Iterable[tuple[int, int]], axes: Axes = None) -> Sharded:
        spec = self._spec(x)
        names = self._axes(spec, axes)
        pairs = self._pairs(spec, permutation, names)
        comm = spec.mesh.group_comm(names)
        if comm is None:
            return x
        local = torch.ops.torch_overlap.permute(x.local, pairs, comm.get_name())
        return Sharded(local, spec)

    def estimate_cost(self, x: Sharded, permutation: Iterable[tuple[int, int]], axes: Axes = None,
                      cost: CostModel | None = None) -> float:  # fmt: skip
        spec = self._spec(x)
        names = self._axes(spec, axes)
        self._pairs(spec, permutation, names)
        size = float(x.local.numel() * x.element_size())
        return (cost or spec.mesh.cost).collective("permute", spec.mesh.mesh.links(names), size)

    def communication_cost(self, x: Sharded, permutation: Iterable[tuple[int, int]], axes: Axes = None) -> float:
        spec = self._spec(x)
        names = self._axes(spec, axes)
        self._pairs(spec, permutation, names)
        return wire_bytes("permute", self._count(spec, names), float(x.local.numel() * x.element_size()))

    def _axes(self, spec: Spec, axes: Axes) -> list[str]:
        mesh = spec.mesh.mesh
        names = axis_names(self.name, mesh, axes) or list(mesh.axes)
        order = list(mesh.axes)
        return sorted(names, key=order.index)

    @staticmethod
    def _count(spec: Spec, names: Sequence[str]) -> int:
        count = 1
        for name in names:
            count *= spec.mesh.mesh.axes[name]
        return count

    def _pairs(self, spec: Spec, permutation: Iterable[tuple[int, int]], names: Sequence[str]) -> list[int]:
        pairs = [(int(a), int(b)) for a, b in permutation]
        count = self._count(spec, names)
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        for what, used in (("source", sources), ("target", targets)):
            if len(set(used)) != len(used) or any(not 0 <= i < count for i in used):
                raise InvalidValueError(
                    f"{self.name}: expected each index below {count}, the places along {list(names)}, at most once as a "
                    f"{what}, got {pairs}"
                )
        layout = spec.layout
        cut = {n.split(":")[0] for dim in layout.dims for n in dim} | {n.split(":")[0] for n in layout.partial}
        whole = [n for n in names if n not in cut and spec.mesh.mesh.axes[n] > 1]
        if whole and len(pairs) != count:
            raise InvalidValueError(
                f"{self.name}: expected a source for each of the {count} places, as {spec.text} is the same along "
                f"{whole}, got {pairs}; name the axes that move, or assume_partial it"
            )
        even = all(
            len({layout.local_shape(spec.shape, r)[d] for r in spec.mesh.mesh.group(spec.mesh.rank, names)}) == 1
            for d in range(len(spec.shape))
        )
        if not even:
            raise InvalidValueError(
                f"{self.name}: expected local tensors of one shape along {list(names)}, got {tuple(spec.shape)} under "
                f"{spec.text}"
            )
        return [i for pair in pairs for i in pair]


_ppermute = PPermuteOp()


def ppermute(x: Sharded, permutation: Iterable[tuple[int, int]], axes: Axes = None) -> Sharded:
    """The local tensor of place `src` becomes that of place `dst`, for each pair; a place with no source gets zeros.

    Places are numbered row by row along `axes`, in the order of the mesh; without `axes`, of the whole mesh. Along
    other axes each group does the same by itself. The gradient goes the way back.

    Raises:
        InvalidValueError: a place twice as a source or a target, or out of range; local tensors of several shapes.
    """
    return _ppermute(x, permutation, axes)
