"""torchcomms' option classes, one per operation: `hints` and `timeout` as one object for `options=`.

They are equivalent to the arguments `hints=` and `timeout=` of the operation.
"""

from torch_overlap._C import (
    AllGatherOptions,
    AllGatherSingleOptions,
    AllReduceOptions,
    AllToAllOptions,
    AllToAllSingleOptions,
    AllToAllvSingleOptions,
    BarrierOptions,
    BatchP2POptions,
    BroadcastOptions,
    GatherOptions,
    GatherSingleOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ReduceScatterSingleOptions,
    ScatterOptions,
    SendOptions,
)

__all__ = [
    "AllGatherOptions",
    "AllGatherSingleOptions",
    "AllReduceOptions",
    "AllToAllOptions",
    "AllToAllSingleOptions",
    "AllToAllvSingleOptions",
    "BarrierOptions",
    "BatchP2POptions",
    "BroadcastOptions",
    "GatherOptions",
    "GatherSingleOptions",
    "RecvOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ReduceScatterSingleOptions",
    "ScatterOptions",
    "SendOptions",
]
