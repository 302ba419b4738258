"""Modules of tensor-parallel models, whose matrix products overlap with communication.

    up = to.nn.ColumnParallelLinear(4096, [11008, 11008], comm, bias=False)  # gate and up share one gather
    down = to.nn.RowParallelLinear(11008, 4096, comm, bias=False)

`torch_overlap.nn.styles` applies them to an existing model through torch's `parallelize_module`. See
docs/explanation/modules.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_overlap.nn.cross_entropy import vocabulary_parallel_cross_entropy
from torch_overlap.nn.float8 import Float8Recipe, update_float8_scales
from torch_overlap.nn.layout import (
    ParameterLayout,
    defer_replicated_grads,
    mark_replicated,
    split_parameters,
    sync_replicated_grads,
)
from torch_overlap.nn.linear import ColumnParallelLinear, RowParallelLinear
from torch_overlap.nn.state import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from torch_overlap.nn.transformer import ParallelMLP, ParallelSelfAttention, ParallelTransformerBlock

if TYPE_CHECKING:
    from torch_overlap.nn import styles

__all__ = [
    "ColumnParallelLinear",
    "Float8Recipe",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelTransformerBlock",
    "ParameterLayout",
    "RowParallelLinear",
    "defer_replicated_grads",
    "full_state_dict",
    "load_full_state_dict",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "mark_replicated",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "split_parameters",
    "styles",
    "sync_replicated_grads",
    "update_float8_scales",
    "vocabulary_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    """Imports styles lazily, since it imports DTensor, which is slow."""
    if name == "styles":
        return importlib.import_module("torch_overlap.nn.styles")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
