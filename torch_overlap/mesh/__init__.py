"""Layouts of tensors on a mesh of ranks, the communication between layouts, and its cost.

    mesh = Mesh({"dp": 2, "tp": 4})
    rows = to_layout(P("dp", "tp"), mesh, 2)
    columns = Layout.parse(mesh, "[],[dp,tp]")
    print(plan_reshard(rows, columns, (4096, 4096), 2, CostModel.h200()).explain())

The planner computes on values: it needs no communicator and no GPU, and a mesh may have any size.
"""

import importlib
from typing import Any

from torch_overlap.mesh._core import (
    AutoShard,
    AxisRef,
    CostModel,
    Graph,
    GraphPlan,
    Layout,
    Mesh,
    OpRule,
    Plan,
    Propagation,
    Step,
    Strategy,
    collect,
    distribute,
    greedy_reshard,
    plan_reshard,
    propagate,
    simulate,
    wire_bytes,
)
from torch_overlap.mesh.auto import ShardingChoice, auto_shard
from torch_overlap.mesh.calibrate import calibrate
from torch_overlap.mesh.checkpoint import (
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from torch_overlap.mesh.communication import (
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    axis_index,
    broadcast,
    from_local,
    gather_all_axes,
    pmean,
    ppermute,
    reduce_scatter,
    reshard,
    shard,
)
from torch_overlap.mesh.connect import MeshComms, connect
from torch_overlap.mesh.cost import load_cost_model, save_cost_model
from torch_overlap.mesh.dispatch import Recipe, recipe_of, run_function
from torch_overlap.mesh.dtensor import from_dtensor, mesh_of, to_dtensor
from torch_overlap.mesh.dynamo import caching_moves
from torch_overlap.mesh.matmuls import Choice, choices, choosing, linear
from torch_overlap.mesh.module import (
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    reduce_gradients,
    shard_module,
    sharded_parameters,
)
from torch_overlap.mesh.sharded import Sharded, register
from torch_overlap.mesh.sharding_spec import DimSpec, P, ShardingSpec, to_layout
from torch_overlap.mesh.trace import Traced, trace
from torch_overlap.mesh.value_spec import gradient_layout
from torch_overlap.mesh.vmap import vmap

register(run_function=run_function, shard=shard)
del run_function, register

__all__ = [
    "AutoShard",
    "AxisRef",
    "Choice",
    "CostModel",
    "DimSpec",
    "Graph",
    "GraphPlan",
    "Layout",
    "Mesh",
    "MeshComms",
    "OpRule",
    "P",
    "Plan",
    "Propagation",
    "Recipe",
    "Sharded",
    "ShardingChoice",
    "ShardingSpec",
    "Step",
    "Strategy",
    "Traced",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_partial",
    "auto_shard",
    "axis_index",
    "broadcast",
    "caching_moves",
    "calibrate",
    "choices",
    "choosing",
    "clip_grad_norm_",
    "collect",
    "connect",
    "distribute",
    "from_dtensor",
    "from_local",
    "full_state_dict",
    "gather_all_axes",
    "gradient_layout",
    "greedy_reshard",
    "linear",
    "load_cost_model",
    "load_full_state_dict",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "mesh_of",
    "plan_reshard",
    "pmean",
    "ppermute",
    "propagate",
    "recipe_of",
    "reduce_gradients",
    "reduce_scatter",
    "reshard",
    "save_cost_model",
    "shard",
    "shard_module",
    "sharded_optimizer_state_dict",
    "sharded_parameters",
    "sharded_state_dict",
    "simulate",
    "to_dtensor",
    "to_layout",
    "trace",
    "vmap",
    "wire_bytes",
]


def __getattr__(name: str) -> Any:
    # The operation classes, which are loaded on first access.
    if name == "CollectiveOperation" or name.endswith("Op"):
        operations = importlib.import_module("torch_overlap.compat.communication")
        if name in operations.__all__:
            return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
