"""Predicts the time and traffic of one training step of a transformer, for any number of ranks, none of which is
needed.

The planner lays out a layer with tensor and sequence parallelism (columns, then rows, the residual stream in parts of
the sequence) over the axis `tp`, the batch over `dp`, the layers over `pp`. Times are those of the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch_overlap.mesh._core import CostModel, Graph, GraphPlan, Layout, Mesh, OpRule, Plan, wire_bytes
from torch_overlap.mesh.models import Transformer

__all__ = ["Prediction", "best", "meshes_for", "predict", "predict_layer"]


@dataclass
class Prediction:
    """One training step of the slowest rank. Times in seconds; `traffic` in bytes that a rank sends, by axis."""

    model: Transformer
    mesh: Mesh
    batch: int
    micro_batches: int
    compute: float = 0  # products, attention, elementwise
    moving: float = 0  # collectives inside layers that do not overlap with a product
    gradients: float = 0  # reduction of gradients, beyond the backward pass
    bubble: float = 0  # pipeline idle time
    optimizer: float = 0
    memory: float = 0  # in bytes
    traffic: dict[str, float] = field(default_factory=dict)
    collectives: list[tuple[str, str, float, float]] = field(default_factory=list)  # one layer's, forward

    @property
    def seconds(self) -> float:
        return self.compute + self.moving + self.gradients + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.model.sequence / self.seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOPS of one rank: six for each parameter and token, and attention."""
        tokens = self.batch * self.model.sequence
        attention = 6 * self.model.layers * self.model.hidden * self.model.sequence
        return tokens * (6 * self.model.parameters + attention) / self.seconds / self.mesh.size


def predict(
    model: Transformer,
    mesh: Mesh,
    *,
    batch: int,
    cost: CostModel | None = None,
    micro_batches: int | None = None,
    overlap: bool = True,
) -> Prediction:
    """Predicts one training step on a mesh with any of the axes dp, tp and pp.

    Args:
        model: the shapes of the model.
        mesh: the mesh.
        batch: sequences over all ranks.
        cost: the cost model. Default: H200s.
        micro_batches: number of micro-batches, run one after the other. Default: one sequence each with a pipeline,
            else 1.
        overlap: if True, products overlap with adjacent collectives, as in the overlapped operators.

    Raises:
        ValueError: sizes that the mesh does not divide.
    """
    cost = cost or CostModel.h200()
    dp, tp, pp = (mesh.axes.get(name, 1) for name in ("dp", "tp", "pp"))
    _check(model, mesh, batch)
    if micro_batches is None:
        micro_batches = batch // dp if pp > 1 else 1
    if micro_batches < 1 or (batch // dp) % micro_batches != 0:
        raise ValueError(
            f"predict: expected micro_batches that divide the {batch // dp} sequences of a replica, got {micro_batches}"
        )
    out = Prediction(model, mesh, batch, micro_batches)
    layer = _Layer(model, mesh, batch // micro_batches)
    plan = layer.graph.plan(cost)
    exposed = _exposed(layer, plan, cost, overlap)
    out.collectives = [
        (op, f"{step.kind} over {','.join(step.axes)}", step.wire_bytes, step.seconds)
        for op, step in layer.graph.collectives(plan)
    ]
    head = _head_seconds(model, batch // dp // micro_batches, tp, cost)
    stage = model.layers / pp
    one_compute = stage * layer.seconds(plan, cost) + 3 * head
    one_moving = 2 * stage * exposed
    out.compute, out.moving = micro_batches * one_compute, micro_batches * one_moving
    for _, step in layer.graph.collectives(plan):
        for axis in step.axes:
            share = step.wire_bytes / len(step.axes) * 2 * stage * micro_batches
            out.traffic[axis] = out.traffic.get(axis, 0) + share
    _pipeline(out, cost, one_compute + one_moving)
    _gradients(out, cost, backward=2 / 3 * micro_batches * one_compute)
    own = _own_parameters(model, tp, pp)
    # AdamW in fp32: gradient, weight, two moments; a 16-bit copy.
    out.optimizer = cost.elementwise(own * (model.eager.parameter if model.eager else 34))
    activations = 34 * model.sequence * (batch // dp // micro_batches) * model.hidden / tp
    out.memory = own * 18 + activations * stage * min(pp, micro_batches)
    return out


def predict_layer(
    model: Transformer, mesh: Mesh, *, batch: int, cost: CostModel | None = None, overlap: bool = True
) -> float:
    """Returns the seconds of one layer, forward and backward, for `batch` sequences over all ranks; no optimizer.

    Raises:
        ValueError: sizes that the mesh does not divide.
    """
    cost = cost or CostModel.h200()
    _check(model, mesh, batch)
    layer = _Layer(model, mesh, batch)
    plan = layer.graph.plan(cost)
    return layer.seconds(plan, cost) + 2 * _exposed(layer, plan, cost, overlap)


def meshes_for(model: Transformer, ranks: int, batch: int, ranks_per_host: int) -> Iterator[Mesh]:
    """Yields every (pp, dp, tp) with this number of ranks that divides the model and the batch, with tp inside a
    host."""
    for tp in _divisors(min(ranks, ranks_per_host)):
        if model.heads % tp or model.kv_heads % tp or model.sequence % tp or ranks % tp:
            continue
        for pp in _divisors(model.layers):
            if ranks % (tp * pp) == 0 and batch % (ranks // (tp * pp)) == 0:
                yield Mesh({"pp": pp, "dp": ranks // (tp * pp), "tp": tp}, ranks_per_host=ranks_per_host)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check(model: Transformer, mesh: Mesh, batch: int) -> None:
    unknown = set(mesh.axes) - {"dp", "tp", "pp"}
    if unknown:
        raise ValueError(f"predict: expected the axes dp, tp and pp, got {sorted(unknown)} as well")
    dp, tp, pp = (mesh.axes.get(name, 1) for name in ("dp", "tp", "pp"))
    for what, value, by, axis in (
        ("batch", batch, dp, "dp"), ("heads", model.heads, tp, "tp"), ("kv_heads", model.kv_heads, tp, "tp"),
        ("sequence", model.sequence, tp, "tp"), ("ffn", model.ffn, tp, "tp"), ("layers", model.layers, pp, "pp"),
    ):  # fmt: skip
        if value < 1 or value % by:
            raise ValueError(f"predict: expected {what} divisible by {axis}={by}, got {value}")


class _Layer:
    """The forward graph of one layer: x [sequence, batch, hidden], laid out as in Megatron."""

    def __init__(self, model: Transformer, mesh: Mesh, batch: int) -> None:
        self.graph, self.mesh = Graph(mesh), mesh
        dp, tp = (mesh.axes.get(name, 1) for name in ("dp", "tp"))
        self.eager, self.elements = model.eager, model.sequence * batch / dp / tp * model.hidden
        self.ops: list[str] = []  # by node
        self.gathered: dict[int, list[int]] = {}  # a value -> the products that consume it
        s, d, h, kv, e = model.sequence, model.hidden, model.heads, model.kv_heads, model.hidden // model.heads
        rows, whole = (s, batch, d), model.residual_size
        self.residual = self._layout("tp", "dp", None)
        x = self.graph.add_value("x", rows, whole, self.residual)
        y = self._norm(x, rows)
        q, k, v = (self._column(name, y, rows, n * e) for name, n in (("q", h), ("k", kv), ("v", kv)))
        q, k, v = (self._heads(t, n, s, batch, e) for t, n in ((q, h), (k, kv), (v, kv)))
        rule = OpRule.attention((batch, h, s, e), (batch, kv, s, e), (batch, kv, s, e), is_causal=True)
        z = self._node(rule, [q, k, v], "attention")
        z = self._node(OpRule.transpose((batch, h, s, e), (2, 0, 1, 3)), [z], "rows")
        z = self._node(OpRule.reshape((s, batch, h, e), (s, batch, h * e)), [z], "joined")
        x = self._add(x, self._row("o", z, (s, batch, h * e), d), rows, whole)
        y = self._norm(x, rows)
        wide = (s, batch, model.ffn)
        up = [self._column(name, y, rows, model.ffn) for name in (("gate", "up") if model.gated else ("up",))]
        g = self._node(OpRule.elementwise("activation", [wide] * len(up)), up, "activation")
        self._add(x, self._row("down", g, wide, d), rows, whole)

    def seconds(self, plan: GraphPlan, cost: CostModel) -> float:
        """Returns the seconds of forward and backward, without communication. Backward has two products for each
        forward one."""
        if self.eager is None:
            return 3 * plan.compute
        # A rank has its share of rows or of heads.
        rest = cost.elementwise(self.eager.layer * self.elements / self.eager.rate)
        steps = zip(self.ops, plan.strategies, strict=True)
        return 3 * sum(strategy.compute for op, strategy in steps if op in ("linear", "attention")) + rest

    def _layout(self, *dims: str | None) -> Layout:
        return Layout(self.mesh, [d if d in self.mesh.axes else None for d in dims])

    def _norm(self, x: int, shape: tuple[int, ...]) -> int:
        weight = self.graph.add_value("norm.weight", shape[-1:], 4, self._layout(None), True)
        y = self._node(OpRule.norm(shape, 1, 1), [x, weight], "norm")
        self.graph.constrain(y, self._layout(None, "dp", None))
        self.gathered[y] = []
        return y

    def _column(self, name: str, x: int, shape: tuple[int, ...], out: int) -> int:
        weight = self.graph.add_value(f"{name}.weight", (out, shape[-1]), 2, self._layout("tp", None), True)
        y = self._node(OpRule.linear(shape, (out, shape[-1])), [x, weight], name)
        self.graph.constrain(y, self._layout(None, "dp", "tp"))
        self.gathered[x].append(len(self.ops) - 1)
        return y

    def _row(self, name: str, x: int, shape: tuple[int, ...], out: int) -> int:
        weight = self.graph.add_value(f"{name}.weight", (out, shape[-1]), 2, self._layout(None, "tp"), True)
        y = self._node(OpRule.linear(shape, (out, shape[-1])), [x, weight], name)
        pending = self._layout(None, "dp", None).with_partial("tp" if "tp" in self.mesh.axes else None)
        self.graph.constrain(y, pending)
        return y

    def _heads(self, x: int, heads: int, s: int, batch: int, e: int) -> int:
        rule = OpRule.reshape((s, batch, heads * e), (s, batch, heads, e))
        x = self._node(rule, [x], "split")
        return self._node(OpRule.transpose((s, batch, heads, e), (1, 2, 0, 3)), [x], "heads")

    def _add(self, x: int, y: int, shape: tuple[int, ...], size: int) -> int:
        z = self._node(OpRule.elementwise("add", [shape, shape], "add"), [x, y], "residual", size)
        self.graph.constrain(z, self.residual)
        return z

    def _node(self, rule: OpRule, inputs: Sequence[int], name: str, size: int = 2) -> int:
        self.ops.append(rule.op)
        return self.graph.add_node(rule, inputs, [name], size)[0]


def _exposed(layer: _Layer, plan: GraphPlan, cost: CostModel, overlaps: bool) -> float:
    """Returns the seconds of a layer's collectives that do not overlap with adjacent products: the consumers of a
    gathered value, or the producer of a scattered one."""

    def beyond(plan: Plan, product: float) -> float:
        if len(plan.steps) != 1 or not overlaps:
            return plan.seconds
        (step,) = plan.steps
        together = cost.overlapped(step.kind, layer.mesh.links(step.axes), step.bytes, product)
        return min(plan.seconds, max(together - product, 0.0))

    exposed, last = 0.0, 0.0
    for op, strategy, plans in zip(layer.ops, plan.strategies, plan.plans, strict=True):
        exposed += sum(beyond(steps, last) for steps in plans)
        last = strategy.compute if op == "linear" else last
    for value, steps in plan.results:
        beside = sum(plan.strategies[node].compute for node in layer.gathered.get(value, []))
        exposed += beyond(steps, beside)
    return exposed


def _head_seconds(model: Transformer, sequences: int, tp: int, cost: CostModel) -> float:
    """Returns the seconds of embedding, last norm and head on a rank's own rows. The last stage has them, and is the
    slowest."""
    rows = sequences * model.sequence / tp
    norm = cost.elementwise(rows * model.hidden * (2 * model.residual_size + 2))
    logits = cost.elementwise(rows * model.vocabulary * 4)
    return norm + cost.matmul(rows, model.vocabulary, model.hidden, 2) + 2 * logits


def _own_parameters(model: Transformer, tp: int, pp: int) -> float:
    return model.layers / pp * model.layer_parameters / tp + 2 * model.vocabulary * model.hidden


def _pipeline(out: Prediction, cost: CostModel, one: float) -> None:
    pp = out.mesh.axes.get("pp", 1)
    if pp == 1:
        return
    dp, tp = (out.mesh.axes.get(name, 1) for name in ("dp", "tp"))
    rows = out.batch // dp // out.micro_batches * out.model.sequence / tp
    size = rows * out.model.hidden * 2
    send = cost.collective("permute", out.mesh.links("pp"), size)
    out.bubble = (pp - 1) * one
    out.moving += 2 * (pp - 1) * send  # the others overlap with the next micro-batch
    out.traffic["pp"] = 2 * out.micro_batches * size


def _gradients(out: Prediction, cost: CostModel, *, backward: float) -> None:
    """Adds the reduction of gradients in fp32: over dp while the backward pass runs, except for the last bucket, or
    after it if eager; replicated ones over tp."""
    model = out.model
    dp, tp, pp = (out.mesh.axes.get(name, 1) for name in ("dp", "tp", "pp"))
    if dp > 1:
        size = 4 * _own_parameters(model, tp, pp)
        whole = cost.collective("all_reduce", out.mesh.links("dp"), size)
        if model.eager:
            out.gradients += whole + cost.elementwise(size / 4 * model.eager.reduced)
        else:
            last = cost.collective("all_reduce", out.mesh.links("dp"), size / max(model.layers // pp, 1))
            out.gradients += max(last, whole - backward)
        out.traffic["dp"] = wire_bytes("all_reduce", dp, size)
    if tp > 1:
        size = 4 * (2 * model.vocabulary * model.hidden + model.layers / pp * 2 * model.hidden)
        out.gradients += cost.collective("all_reduce", out.mesh.links("tp"), size)
        out.traffic["tp"] = out.traffic.get("tp", 0) + wire_bytes("all_reduce", tp, size)


def best(
    model: Transformer, ranks: int, batch: int, ranks_per_host: int, cost: CostModel, memory: float
) -> Sequence[Prediction]:
    """Returns a prediction for every mesh that fits into `memory` bytes, fastest first."""
    found = [predict(model, mesh, batch=batch, cost=cost) for mesh in meshes_for(model, ranks, batch, ranks_per_host)]
    return sorted((p for p in found if p.memory <= memory), key=lambda p: (p.seconds, str(p.mesh)))
