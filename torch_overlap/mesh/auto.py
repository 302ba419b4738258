"""auto_shard: finds layouts for a module or function without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from torch_overlap.mesh._core import AutoShard, CostModel, GraphPlan, Layout, Mesh, Step
from torch_overlap.mesh.trace import Traced, trace

__all__ = ["ShardingChoice", "auto_shard"]


class ShardingChoice:
    """The result of auto_shard.

    Attributes:
        layouts: Layouts of the arguments, parameters and buffers, by name.
        out_layouts: Layouts of the results.
        plan: The whole plan, operator by operator.
        alternatives: (name, plan) of all compared plans, cheapest first.
        unknown: Operators without a rule, which run on whole tensors.
    """

    def __init__(self, traced: Traced, found: AutoShard) -> None:
        self._traced, self._found = traced, found
        self.plan: GraphPlan = found.plan
        self.alternatives: list[tuple[str, GraphPlan]] = found.alternatives
        self.unknown: list[str] = sorted(set(traced.unknown))
        self.layouts: dict[str, Layout] = {name: found.plan.layouts[v] for name, v in traced.inputs.items()}
        ends = {value: plan.to_layout for value, plan in found.plan.results}
        self.out_layouts: list[Layout] = [ends.get(v, found.plan.layouts[v]) for v in traced.outputs]

    @property
    def collectives(self) -> list[tuple[str, Step]]:
        """Returns (operator, step) of each collective of a forward run, in order."""
        return self._traced.graph.collectives(self.plan)

    def explain(self) -> str:
        """Returns a text with the layouts, their cost, and the alternatives."""
        text = self._found.explain(self._traced.graph)
        if self.unknown:
            text += f"on whole tensors, for want of a rule: {', '.join(self.unknown)}\n"
        return text


def auto_shard(
    target: nn.Module | Callable[..., Any],
    mesh: Mesh,
    args: Sequence[Any],
    *,
    cost: CostModel | None = None,
    layouts: Mapping[str, Any] | None = None,
    out_layouts: Sequence[Any] | None = None,
    training: bool = False,
) -> ShardingChoice:
    """Returns the cheapest layouts of everything that `layouts` and `out_layouts` leave free.

    Nothing is computed or sent. The result is the same on every rank.

    Args:
        target: the module or function to trace.
        mesh: the mesh to shard over.
        args: the arguments to trace with; meta tensors are accepted.
        cost: the cost model. Default: H200s.
        layouts: fixed layouts of inputs, by name.
        out_layouts: fixed layouts of the results.
        training: if True, counts the backward pass: the reduction of the gradients of parameters that are whole along
            axes along which others are sharded.

    Raises:
        ValueError: an invalid layout, or one for an input that does not exist.
    """
    traced = trace(target, args, mesh, layouts, out_layouts)
    return ShardingChoice(traced, traced.graph.auto_shard(cost or CostModel.h200(), training=training))
