"""Communication as functions of Sharded values. One file has each function's shape, layout, gradient, cost and
execution.

The operation classes, which are loaded on first access, are those of torch_overlap.compat.communication.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch_overlap.mesh.communication.all_gather import all_gather, gather_all_axes
from torch_overlap.mesh.communication.all_reduce import all_reduce, pmean
from torch_overlap.mesh.communication.all_to_all import all_to_all
from torch_overlap.mesh.communication.axis_index import axis_index
from torch_overlap.mesh.communication.broadcast import broadcast
from torch_overlap.mesh.communication.from_local import from_local
from torch_overlap.mesh.communication.p_permute import ppermute
from torch_overlap.mesh.communication.reduce_scatter import reduce_scatter
from torch_overlap.mesh.communication.reshard import assume_partial, reshard
from torch_overlap.mesh.communication.shard import shard

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_partial",
    "axis_index",
    "broadcast",
    "from_local",
    "gather_all_axes",
    "pmean",
    "ppermute",
    "reduce_scatter",
    "reshard",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "CollectiveOperation" or name.endswith("Op"):
        operations = importlib.import_module("torch_overlap.compat.communication")
        if name in operations.__all__:
            return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
