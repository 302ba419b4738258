"""A module or function as a graph of the planner: traced by torch.export, one rule per operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from torch_overlap._C import UnsupportedError
from torch_overlap.mesh._core import Graph, Layout, Mesh, OpRule
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.capture import capture
from torch_overlap.mesh.expand import EXPANSIONS
from torch_overlap.mesh.rules import rule_of
from torch_overlap.mesh.sharding_spec import DimSpec, ShardingSpec, to_layout

__all__ = ["Traced", "trace"]

Shape = tuple[int, ...]


class Traced:
    """A graph and the names of its values.

    Attributes:
        graph: The operators.
        inputs: The number of each input by its name: arguments, parameters and buffers.
        outputs: The numbers of the results.
        unknown: Operators without a rule; they run on whole tensors.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.graph = Graph(mesh)
        self.inputs: dict[str, int] = {}
        self.outputs: list[int] = []
        self.unknown: list[str] = []


def trace(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    layouts: Mapping[str, Any] | None = None,
    out_layouts: Sequence[Any] | None = None,
) -> Traced:
    """Traces `target(*args)`. No value is computed; meta tensors are accepted.

    Args:
        target: the module or function.
        args: its arguments.
        mesh: the mesh of the layouts.
        layouts: the known layouts of inputs, by name (of an argument, or of a parameter as in state_dict); any spelling
            of a layout, or a ShardingSpec whose open dimensions may be sharded further. The rest is free.
        out_layouts: the same for the results, None for free ones.

    Raises:
        ValueError: a layout for an input that does not exist, or another number of results.
    """
    module = target if isinstance(target, nn.Module) else _Function(target)
    program = torch.export.export(module, tuple(args), strict=False)
    traced = Traced(mesh)
    builder = _Builder(traced)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    wanted = dict(layouts or {})
    user_names = iter(_argument_names(target, args))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            is_input = spec.kind is InputKind.USER_INPUT
            name = next(user_names, node.name) if is_input else str(spec.target or node.name)
            if isinstance(node.meta.get("val"), torch.Tensor):
                layout = wanted.pop(name, None)
                traced.inputs[name] = builder.value(node, name, layout, is_parameter=spec.kind is InputKind.PARAMETER)
        elif node.op == "call_function":
            builder.call(node)
        elif node.op == "output":
            results = [n for n in pytree.tree_leaves(node.args) if isinstance(n, fx.Node) and n in builder.numbers]
            traced.outputs = [builder.numbers[n] for n in results]
    if wanted:
        raise ValueError(f"trace: expected layouts of {sorted(traced.inputs)}, got some of {sorted(wanted)}")
    if out_layouts is not None:
        if len(out_layouts) != len(traced.outputs):
            raise ValueError(f"trace: expected {len(traced.outputs)} out_layouts, got {len(out_layouts)}")
        for number, layout in zip(traced.outputs, out_layouts, strict=True):
            if layout is not None:
                traced.graph.constrain(number, _constraint(layout, mesh, traced.graph.values[number][1]))
    return traced


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _argument_names(target: Any, args: Sequence[Any]) -> list[str]:
    function = target.forward if isinstance(target, nn.Module) else target
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names += [f"arg{i}" for i in range(len(names), len(args))]
    return [name for name, arg in zip(names, args, strict=False) if isinstance(arg, torch.Tensor)]


def _constraint(layout: Any, mesh: Mesh, shape: Shape) -> Any:
    dims = layout.dim_specs if isinstance(layout, ShardingSpec) else layout
    if isinstance(dims, tuple | list) and any(isinstance(d, DimSpec) and d.is_open for d in dims):
        full = [d if isinstance(d, DimSpec) else DimSpec(d or ()) for d in dims]
        full += [DimSpec(is_open=True)] * (len(shape) - len(full))
        return [(d.axes, d.is_open, d.priority) for d in full]
    return to_layout(layout, mesh, len(shape))


def _shape(node: fx.Node) -> Shape:
    return tuple(int(n) for n in node.meta["val"].shape)


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tuple(int(n) for n in tensor.shape), tensor.dtype)


class _Builder:
    """Adds nodes of torch's graph to the planner's."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.graph = traced, traced.graph
        self.numbers: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, list[int]] = {}  # for operators with several results

    def value(self, node: fx.Node, name: str, layout: Any = None, *, is_parameter: bool = False) -> int:
        shape = _shape(node)
        constraint = None if layout is None else _constraint(layout, self.graph.mesh, shape)
        size = node.meta["val"].dtype.itemsize
        self.numbers[node] = self.graph.add_value(name, shape, size, constraint, is_parameter)
        return self.numbers[node]

    def call(self, node: fx.Node) -> None:
        if str(node.target) == "<built-in function getitem>":
            source, index = node.args
            self.numbers[node] = self.parts[source][int(index)]  # type: ignore[index, arg-type]
            return
        results = node.meta.get("val")
        is_sequence = isinstance(results, list | tuple)
        outputs = [_operand(r) for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        if not outputs:
            return
        arguments = (node.args, node.kwargs)
        tensors = [a for a in pytree.tree_leaves(arguments) if isinstance(a, fx.Node) and a in self.numbers]
        if not tensors:  # arange, zeros: the same on all ranks
            for_all = Layout.replicated(self.graph.mesh, len(_shape(node)))
            self.value(node, node.name, for_all)
            return
        args, kwargs = pytree.tree_map_only(fx.Node, self._as_operand, arguments)
        call = AtenCall(node.target, args, kwargs, outputs, is_sequence=is_sequence)
        made = self._add(call, [self.numbers[t] for t in tensors], node.name)
        if is_sequence:
            self.parts[node] = made
        else:
            self.numbers[node] = made[0]

    def _add(self, call: AtenCall, inputs: list[int], name: str) -> list[int]:
        """Adds an operator, or its expansion; returns the numbers of its results."""
        program = None
        if call.name in EXPANSIONS:
            with suppress(UnsupportedError):
                program = capture(call.target, call.args, call.kwargs)
        if program is None or program.constants or len(program.steps) == 1:
            return self._add_one(call, inputs, name)
        numbers = dict(enumerate(inputs))
        for i, step in enumerate(program.steps):
            own = f"{name}.{step.call.name}" if i + 1 < len(program.steps) else name
            given = [numbers[n] for n in step.inputs]
            made = self._add_one(step.call, given, own) if given else [self._constant(step.call, own)]
            numbers.update(zip(step.outputs, made, strict=True))
        refs = program.result if call.is_sequence else [program.result]
        return [numbers[ref.number] for ref in refs]

    def _add_one(self, call: AtenCall, inputs: list[int], name: str) -> list[int]:
        rule = rule_of(call)
        if rule is None:
            self.traced.unknown.append(call.name)
            rule = OpRule.opaque(call.name, [x.shape for x in call.inputs], [x.shape for x in call.outputs])
        names = [name if len(call.outputs) == 1 else f"{name}.{i}" for i in range(len(call.outputs))]
        return self.graph.add_node(rule, inputs, names, call.outputs[0].dtype.itemsize)

    def _constant(self, call: AtenCall, name: str) -> int:
        (made,) = call.outputs
        for_all = Layout.replicated(self.graph.mesh, len(made.shape))
        return self.graph.add_value(name, made.shape, made.dtype.itemsize, for_all)

    def _as_operand(self, node: fx.Node) -> Any:
        """Returns the operand of an AtenCall for a value of the graph."""
        return _operand(node.meta["val"]) if node in self.numbers else node
