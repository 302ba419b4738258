"""Communication as functions of Sharded values. One file has each function's shape, layout, gradient, cost and
execution."""

from torch_overlap.mesh.communication.all_gather import (
    AllGatherOp,
    GatherAllAxesOp,
    all_gather,
    gather_all_axes,
)
from torch_overlap.mesh.communication.all_reduce import AllReduceOp, PMeanOp, all_reduce, pmean
from torch_overlap.mesh.communication.all_to_all import AllToAllOp, all_to_all
from torch_overlap.mesh.communication.axis_index import AxisIndexOp, axis_index
from torch_overlap.mesh.communication.base import CollectiveOperation
from torch_overlap.mesh.communication.broadcast import BroadcastOp, broadcast
from torch_overlap.mesh.communication.p_permute import PPermuteOp, ppermute
from torch_overlap.mesh.communication.reduce_scatter import ReduceScatterOp, reduce_scatter
from torch_overlap.mesh.communication.reshard import AssumePartialOp, ReshardOp, assume_partial, reshard
from torch_overlap.mesh.communication.shard import ShardOp, shard

__all__ = [
    "AllGatherOp",
    "AllReduceOp",
    "AllToAllOp",
    "AssumePartialOp",
    "AxisIndexOp",
    "BroadcastOp",
    "CollectiveOperation",
    "GatherAllAxesOp",
    "PMeanOp",
    "PPermuteOp",
    "ReduceScatterOp",
    "ReshardOp",
    "ShardOp",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_partial",
    "axis_index",
    "broadcast",
    "gather_all_axes",
    "pmean",
    "ppermute",
    "reduce_scatter",
    "reshard",
    "shard",
]
