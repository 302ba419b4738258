"""Runs a torch function on meshes of simulated ranks: captured, planned, its parts run one rank after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_overlap.mesh import CostModel, Layout, Mesh, OpRule, collect, distribute, propagate, simulate
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.capture import capture
from torch_overlap.mesh.local import local_call
from torch_overlap.mesh.program import Program
from torch_overlap.mesh.rules import rule_of

H200 = CostModel.h200()
MESHES = ("a=1,b=2", "a=2,b=1", "a=2,b=2", "a=1,b=4", "a=4,b=1", "a=2,b=4", "a=4,b=2", "a=3,b=2", "a=2,b=2,c=2")


@dataclass
class Value:
    """A tensor of the mesh: the part of each rank, by index."""

    parts: list[Tensor]
    layout: Layout
    operand: Operand

    def collected(self) -> Tensor:
        arrays = [np.round(part.detach().to(torch.float64).numpy(), 9) for part in self.parts]
        return torch.from_numpy(collect(arrays, self.layout, self.operand.shape)).to(self.operand.dtype)


def random_layout(rng: random.Random, mesh: Mesh, dims: int, *, partial: bool = False) -> Layout:
    lists: list[list[str]] = [[] for _ in range(dims)]
    pending = []
    for name in sorted(mesh.axes, key=lambda _: rng.random()):
        place = rng.randrange(dims + 2)
        if place < dims:
            lists[place].append(name)
        elif partial and place == dims:
            pending.append(name)
    return Layout(mesh, lists, pending)


def spread(x: Tensor, layout: Layout, rng: random.Random) -> Value:
    """Returns the parts of x. Those of a partial sum are random, so that none is zero; their sums are exact."""
    mesh = layout.mesh
    cut = layout.with_partial(None)
    parts = distribute(x.to(torch.float64).numpy(), cut)
    for axis in layout.partial:
        noise = [np.array([rng.randrange(-64, 64) / 16 for _ in range(x.numel())]).reshape(x.shape)
                 for _ in range(mesh.axes[axis] - 1)]  # fmt: skip
        locals_ = [distribute(n, cut) for n in noise]
        for index, rank in enumerate(mesh.ranks):
            at = mesh.coordinate(rank, axis)
            if at > 0:
                parts[index] = locals_[at - 1][index]
            else:
                parts[index] = parts[index] - sum(n[index] for n in locals_)
    return Value([torch.from_numpy(np.array(p)).to(x.dtype) for p in parts], layout,
                 Operand(tuple(x.shape), x.dtype))  # fmt: skip


def moved(value: Value, plan: Any, layout: Layout) -> Value:
    arrays = simulate(plan, [part.detach().to(torch.float64).numpy() for part in value.parts])
    return Value([torch.from_numpy(np.array(a)).to(value.operand.dtype) for a in arrays], layout, value.operand)


def run_call(call: AtenCall, inputs: Sequence[Value], mesh: Mesh, *, kinds: list[str] | None = None) -> list[Value]:
    """Returns the values of all ranks after one operator; the kinds of the steps that send are added to `kinds`."""
    if not call.inputs:
        layouts = [Layout.replicated(mesh, len(x.shape)) for x in call.outputs]
        locals_ = [local_call(call, None, [], layouts, rank, torch.device("cpu"))([]) for rank in mesh.ranks]
        return _values(call, locals_, layouts)
    shapes, out_shapes = [x.shape for x in call.inputs], [x.shape for x in call.outputs]
    known = rule_of(call)
    rule = known or OpRule.opaque(call.name, shapes, out_shapes)
    sizes = [x.dtype.itemsize for x in [*call.inputs, *call.outputs]]
    found = propagate(rule, [x.layout for x in inputs], H200, sizes)
    if kinds is not None:
        kinds += [step.kind for plan in found.plans for step in plan.steps if step.sends]
    moved_ = [moved(x, p, y) for x, p, y in zip(inputs, found.plans, found.chosen.inputs, strict=True)]
    locals_ = []
    for index, rank in enumerate(mesh.ranks):
        local = local_call(call, known, found.chosen.inputs, found.chosen.outputs, rank)
        locals_.append(local([x.parts[index] for x in moved_]))
    return _values(call, locals_, found.chosen.outputs)


def _values(call: AtenCall, locals_: list[Any], layouts: Sequence[Layout]) -> list[Value]:
    lists = [list(x) if call.is_sequence else [x] for x in locals_]
    out = []
    for i, (operand, layout) in enumerate(zip(call.outputs, layouts, strict=True)):
        parts = [x[i] for x in lists]
        for rank, part in zip(layout.mesh.ranks, parts, strict=True):
            assert tuple(part.shape) == layout.local_shape(operand.shape, rank), f"{call} as {layout}, rank {rank}"
            assert part.dtype == operand.dtype, f"{call}: {part.dtype}"
        out.append(Value(parts, layout, operand))
    return out


def run_program(program: Program, operands: Sequence[Value], mesh: Mesh, kinds: list[str] | None = None) -> Any:
    """Returns the result of a captured function, with Values for tensors."""
    values: dict[int, Value] = dict(enumerate(operands))
    for number, constant in program.constants.items():
        values[number] = spread(constant, Layout.replicated(mesh, constant.dim()), random.Random(0))
    for step in program.steps:
        outs = run_call(step.call, [values[n] for n in step.inputs], mesh, kinds=kinds)
        values.update(zip(step.outputs, outs, strict=True))
    return program.results(values.__getitem__)


def captured(function: Callable[..., Any], tensors: Sequence[Tensor], layouts: Sequence[Layout] = ()) -> Program:
    return capture(function, [Operand(tuple(x.shape), x.dtype) for x in tensors], layouts=layouts)
