"""Nabla's operation classes: the communication functions of torch_overlap.mesh as objects, with their costs.

    seconds = AllReduceOp().estimate_cost(x)

`torch_overlap.mesh.communication` has the same names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_overlap._C import MeshComms
from torch_overlap.mesh._core import CostModel, Plan, plan_reshard, wire_bytes
from torch_overlap.mesh.communication.all_gather import all_gather_move, gather_all_axes_move
from torch_overlap.mesh.communication.all_reduce import all_reduce_move, pmean_move
from torch_overlap.mesh.communication.all_to_all import all_to_all_move
from torch_overlap.mesh.communication.axis_index import axis_index
from torch_overlap.mesh.communication.base import Move, run_move, sharded_spec
from torch_overlap.mesh.communication.broadcast import broadcast, broadcast_axes
from torch_overlap.mesh.communication.p_permute import ppermute, ppermute_axes
from torch_overlap.mesh.communication.reduce_scatter import reduce_scatter_move
from torch_overlap.mesh.communication.reshard import assume_partial_move, reshard_move
from torch_overlap.mesh.communication.shard import shard, shard_move
from torch_overlap.mesh.sharded import Sharded

__all__ = [
    "AllGatherOp",
    "AllReduceOp",
    "AllToAllOp",
    "AssumePartialOp",
    "AxisIndexOp",
    "BroadcastOp",
    "CollectiveOperation",
    "GatherAllAxesOp",
    "LayoutOperation",
    "LocalOperation",
    "PMeanOp",
    "PPermuteOp",
    "ReduceScatterOp",
    "ReshardOp",
    "ShardOp",
]


class CollectiveOperation(ABC):
    """A communication function of Sharded values, with its cost."""

    name: str

    @abstractmethod
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Sharded:
        """Runs the operation."""

    @abstractmethod
    def estimate_cost(self, x: Any, *args: Any, cost: CostModel | None = None, **kwargs: Any) -> float:
        """Returns the seconds with these arguments, by the given cost model or else the mesh's."""

    @abstractmethod
    def communication_cost(self, x: Any, *args: Any, **kwargs: Any) -> float:
        """Returns the bytes that a rank sends with these arguments: 2(N-1)/N of its tensor for all_reduce, (N-1)/N of
        the larger of input and output for all_gather, reduce_scatter and all_to_all."""


class LayoutOperation(CollectiveOperation):
    """An operation defined by a rule for shape and layout, whose cost is that of a plan."""

    move: Callable[..., Move]

    def __call__(self, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        return run_move(self.name, self.move, x, *args, **kwargs)

    def plan(self, x: Sharded, *args: Any, cost: CostModel | None = None, **kwargs: Any) -> Plan:
        """Returns the steps of the operation for this operand."""
        spec = sharded_spec(self.name, x)
        source, target, shape = self.move(spec, *args, **kwargs)
        return plan_reshard(source, target, shape, spec.dtype.itemsize, cost or spec.mesh.cost)

    def estimate_cost(self, x: Sharded, *args: Any, cost: CostModel | None = None, **kwargs: Any) -> float:
        """Returns the seconds; see CollectiveOperation."""
        return self.plan(x, *args, cost=cost, **kwargs).seconds

    def communication_cost(self, x: Sharded, *args: Any, **kwargs: Any) -> float:
        """Returns the bytes; see CollectiveOperation."""
        return self.plan(x, *args, **kwargs).wire_bytes


class LocalOperation(CollectiveOperation):
    """An operation on the local tensors as they are, independent of their meaning: one collective over some axes."""

    collective: str  # a name of CostModel.collective
    function: Callable[..., Sharded]
    axes: Callable[..., list[str]]

    def __call__(self, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        return self.function(x, *args, **kwargs)

    def estimate_cost(self, x: Sharded, *args: Any, cost: CostModel | None = None, **kwargs: Any) -> float:
        """Returns the seconds; see CollectiveOperation."""
        spec = sharded_spec(self.name, x)
        links = spec.mesh.mesh.links(self.axes(spec, *args, **kwargs))
        return (cost or spec.mesh.cost).collective(self.collective, links, x.local.numel() * x.element_size())

    def communication_cost(self, x: Sharded, *args: Any, **kwargs: Any) -> float:
        """Returns the bytes; see CollectiveOperation."""
        spec = sharded_spec(self.name, x)
        ranks = len(spec.mesh.mesh.group(spec.mesh.rank, self.axes(spec, *args, **kwargs)))
        return wire_bytes(self.collective, ranks, x.local.numel() * x.element_size())


class ShardOp(LayoutOperation):
    """Places a Sharded on its mesh, or a plain tensor on a given mesh; see shard."""

    name, move = "shard", staticmethod(shard_move)

    def __call__(self, x: Sharded | Tensor, *args: Any, **kwargs: Any) -> Sharded:
        """Runs shard(x, mesh, spec) for a plain tensor, otherwise the operation (x, spec)."""
        return super().__call__(x, *args, **kwargs) if isinstance(x, Sharded) else shard(x, *args, **kwargs)


class ReshardOp(LayoutOperation):
    """Converts any layout to any other; see reshard."""

    name, move = "reshard", staticmethod(reshard_move)


class AssumePartialOp(LayoutOperation):
    """Reinterprets copies as terms; see assume_partial."""

    name, move = "assume_partial", staticmethod(assume_partial_move)


class AllReduceOp(LayoutOperation):
    """Reduces over `reduce_axes`; see all_reduce."""

    name, move = "all_reduce", staticmethod(all_reduce_move)


class PMeanOp(LayoutOperation):
    """Averages over an axis; see pmean."""

    name, move = "pmean", staticmethod(pmean_move)


class AllGatherOp(LayoutOperation):
    """Gathers one dimension; see all_gather."""

    name, move = "all_gather", staticmethod(all_gather_move)


class GatherAllAxesOp(LayoutOperation):
    """Gathers and reduces everything; see gather_all_axes."""

    name, move = "gather_all_axes", staticmethod(gather_all_axes_move)


class ReduceScatterOp(LayoutOperation):
    """Reduces and scatters; see reduce_scatter."""

    name, move = "reduce_scatter", staticmethod(reduce_scatter_move)


class AllToAllOp(LayoutOperation):
    """Moves a sharding; see all_to_all."""

    name, move = "all_to_all", staticmethod(all_to_all_move)


class PPermuteOp(LocalOperation):
    """Permutes local tensors; see ppermute."""

    name, collective = "ppermute", "permute"
    function, axes = staticmethod(ppermute), staticmethod(ppermute_axes)


class BroadcastOp(LocalOperation):
    """Copies one rank's tensor to all; see broadcast."""

    name = collective = "broadcast"
    function, axes = staticmethod(broadcast), staticmethod(broadcast_axes)


class AxisIndexOp(CollectiveOperation):
    """Coordinates as data; see axis_index."""

    name = "axis_index"

    def __call__(self, mesh: MeshComms, axis_name: str) -> Sharded:
        return axis_index(mesh, axis_name)

    def estimate_cost(self, *_: object, **__: object) -> float:
        """Returns 0: nothing is sent."""
        return 0.0

    def communication_cost(self, *_: object, **__: object) -> float:
        """Returns 0: nothing is sent."""
        return 0.0
