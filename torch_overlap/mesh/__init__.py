"""Where the parts of tensors lie on a mesh of ranks, what moves them, and what that costs.

mesh = Mesh({"dp": 2, "tp": 4})
rows = to_layout(P("dp", "tp"), mesh, 2)
columns = Layout.parse(mesh, "[],[dp,tp]")
print(plan_reshard(rows, columns, (4096, 4096), 2, CostModel.h200()).explain())

Values in, values out: no communicator and no GPU is needed, a mesh may have any size.
"""

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
from torch_overlap.mesh.cost import load_cost_model, save_cost_model
from torch_overlap.mesh.spec import DimSpec, P, ShardingSpec, to_layout
from torch_overlap.mesh.trace import Traced, trace

__all__ = [
    "AutoShard",
    "AxisRef",
    "CostModel",
    "DimSpec",
    "Graph",
    "GraphPlan",
    "Layout",
    "Mesh",
    "OpRule",
    "P",
    "Plan",
    "Propagation",
    "ShardingChoice",
    "ShardingSpec",
    "Step",
    "Strategy",
    "Traced",
    "auto_shard",
    "collect",
    "distribute",
    "greedy_reshard",
    "load_cost_model",
    "plan_reshard",
    "propagate",
    "save_cost_model",
    "simulate",
    "to_layout",
    "trace",
    "wire_bytes",
]
