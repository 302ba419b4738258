"""Runs torch functions on Sharded values.

The first call for given layouts captures the function as ATen operators on tensors of global shape, plans each one
(`propagate`), and keeps a recipe: the moves of the operands, the operators on local tensors, and the layouts of the
results. Later calls look the recipe up and run it. Recipes depend only on layouts, shapes and dtypes: they are the same
on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms, UnsupportedError
from torch_overlap.mesh._core import OpRule, Plan, Propagation, Strategy, propagate
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.autocast import argument_dtype, autocast_of
from torch_overlap.mesh.autograd import AUTOGRAD
from torch_overlap.mesh.capture import capture
from torch_overlap.mesh.dynamo import (
    DynamoConstant,
    as_dynamo_constant,
    caching_moves,
    is_dynamo_compiling,
    register_constant,
    run_in_graph,
)
from torch_overlap.mesh.local import local_call
from torch_overlap.mesh.matmuls import (
    DeferredMatmul,
    GatherMatmul,
    UnevenShards,
    is_matmul,
    local_sizes,
    make_gather_matmul,
    uneven_shards,
)
from torch_overlap.mesh.program import Program, Ref
from torch_overlap.mesh.rules import rule_of, widens
from torch_overlap.mesh.sharded import Provenance, Sharded, provenance_of
from torch_overlap.mesh.sparse_gradients import has_sparse_gradient, refuse_sparse_gradient
from torch_overlap.mesh.value_spec import ValueSpec, replicated_spec, spec_of

__all__ = ["Recipe", "RecipeStep", "recipe_of", "run_function"]

MAX_RECIPES = 8192


@dataclass
class RecipeStep:
    """One operator of a recipe.

    Attributes:
        call: The operator, on global shapes.
        found: The strategies that `propagate` compared; None without operands.
        strategy: The selected strategy: the cheapest that moves no anchored operand, and adds no narrow terms.
        plans: The plan that moves each operand.
        inputs: (value, the ValueSpec that it must have).
        run_local: The operator on a rank's local tensors.
        outputs: The ValueSpecs of the results.
        gathers: The variant that gathers its first operand while it multiplies.
        is_deferred_matmul: True if its result is partial, so that it is computed only when the reduction is known.
    """

    call: AtenCall
    found: Propagation | None
    strategy: Strategy | None
    plans: list[Plan]
    inputs: list[tuple[int, ValueSpec]]
    run_local: Callable[[Sequence[Tensor]], Any]
    outputs: list[ValueSpec]
    numbers: tuple[int, ...] = ()  # numbers of the results among the values
    gathers: GatherMatmul | None = None
    is_deferred_matmul: bool = False
    sizes: tuple[int, int, int] = (0, 0, 0)  # rows, columns and inner size of the local product
    uneven: UnevenShards = ()  # for the weight of a product
    # Results that are used, until their shapes and dtypes have been checked by the first eager run.
    unchecked: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.constant_name = register_constant(self)

    def explain(self) -> str:
        if self.found is None or self.strategy is None:
            return f"{self.call.name}: the same on every rank\n"
        text = self.found.explain()
        if self.strategy.roles != self.found.chosen.roles:
            text += f"  used: {self.strategy.roles}, which moves no anchored operand and adds no narrow terms\n"
        return text

    # Functions that Dynamo traces call methods as RecipeStep.run(step, ...): it guards functions, not bound methods.
    def run(self, values: Any) -> list[Sharded]:
        spec = self.outputs[0]
        provenance = provenance_of(spec)
        if self.gathers is not None:
            first, *others = [values[i] for i, _ in self.inputs]
            group = GatherMatmul.select_group(self.gathers, first, others)
            if group is not None:
                rest = [values[i]._operand_under(to) for i, to in self.inputs[1:]]
                return [Sharded(GatherMatmul.run(self.gathers, first, rest, group), spec, None, provenance)]
        operands = [values[i]._operand_under(to) for i, to in self.inputs]
        if self.is_deferred_matmul:
            bias = values[self.inputs[2][0]] if len(self.inputs) > 2 else None
            return [Sharded(None, spec, DeferredMatmul(self, operands, bias), provenance)]
        if is_dynamo_compiling():
            out = run_in_graph(self.constant_name, operands)
        else:
            out = self.run_local(operands)
            if self.unchecked:
                self._check_shapes([out] if isinstance(out, Tensor) else out)
        if not self.call.is_sequence:
            return [Sharded(out, spec, None, provenance)]
        return [Sharded(one, of, None, provenance) for one, of in zip(out, self.outputs, strict=True)]

    def _check_shapes(self, results: Sequence[Tensor]) -> None:
        """Compares the first results with the layouts, which hold what torch computes from shapes alone.

        Unused ones (statistics of a norm, offsets of bags) may have other shapes and dtypes, by device.
        """
        for number, result, spec in zip(self.numbers, results, self.outputs, strict=True):
            expected, got = (spec.local_shape, spec.dtype), (tuple(result.shape), result.dtype)
            if number in self.unchecked and expected != got:
                raise UnsupportedError(
                    f"{self.call.name}: expected a local result of shape {expected[0]} and {expected[1]} by torch's "
                    f"shape function, got {got[0]} and {got[1]}; compute it on .local, or on a plain tensor (.full())"
                )
        self.unchecked = frozenset()


class _Constant(DynamoConstant):
    """A constant tensor of a function, the same on every rank."""

    def __init__(self, value: Tensor, mesh: MeshComms, device: torch.device) -> None:
        super().__init__()
        self.spec = replicated_spec(mesh, value.shape, value.dtype)
        self.value = Sharded(value.to(device), self.spec)

    def replicated_value(self) -> Sharded:
        if not is_dynamo_compiling():
            return self.value
        return Sharded(run_in_graph(self.constant_name, []), self.spec, None, Provenance.FUNCTION)

    def run_local(self, _: Sequence[Tensor]) -> Tensor:
        """Makes the tensor again on each call: a compiled graph accepts no tensor from outside."""
        value = self.value.local
        return torch.tensor(value.tolist(), dtype=value.dtype, device=value.device).reshape(value.shape)


class Recipe:
    """Runs a function on operands with given ValueSpecs.

    Attributes:
        steps: Its operators.
    """

    def __init__(self, program: Program, steps: list[RecipeStep], constants: dict[int, _Constant]) -> None:
        self.steps = steps
        self._program, self._constants = program, tuple(constants.items())
        # Operands of several operators.
        uses = Counter(number for step in steps for number, _ in step.inputs)
        results = [leaf.number for leaf in pytree.tree_leaves(program.result) if isinstance(leaf, Ref)]
        for step in steps:
            step.unchecked = frozenset(step.numbers) & {*uses, *results}
        self._multi_use_operands = tuple(number for number, count in uses.items() if count > 1)
        # Fast path of most functions: a single operator gives the result.
        self._single_step = steps[0] if len(steps) == 1 and not constants and not steps[0].call.is_sequence else None
        if self._single_step is not None and program.result != Ref(self._single_step.numbers[0]):
            self._single_step = None

    def run(self, operands: list[Sharded]) -> Any:
        """Runs the function on operands whose ValueSpecs are those of the recipe.

        Operands are moved first, then the local tensors are computed, on the current stream; collective over the mesh
        if a step communicates. Returns the result of the torch function, with a Sharded for each tensor.
        """
        if self._single_step is not None:
            return RecipeStep.run(self._single_step, operands)[0]
        if is_dynamo_compiling():
            with caching_moves():  # a value that several steps need is moved once
                return Recipe._run_steps(self, operands)
        return Recipe._run_steps(self, operands)

    def _run_steps(self, operands: list[Sharded]) -> Any:
        values = dict(enumerate(operands))
        for number in self._multi_use_operands:
            if number < len(operands):  # moved once for all of them, even if the caller may change it after the call
                values[number] = _as_result(operands[number])
        for number, constant in self._constants:
            values[number] = _Constant.replicated_value(constant)
        for step in self.steps:
            values.update(zip(step.numbers, RecipeStep.run(step, values), strict=True))
        return Program.results(self._program, values.__getitem__)

    @property
    def plans(self) -> list[Plan]:
        """Returns the plans that move something, in order."""
        return [plan for step in self.steps for plan in step.plans if plan.steps]

    def explain(self) -> str:
        """Returns a text with the operators, the strategy and moves of each one, and the alternatives."""
        return "".join(step.explain() for step in self.steps)


def run_function(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "") -> Any:
    """Runs `func(*args, **kwargs)` if some arguments are Sharded.

    `method` is the name of a method of torch.Tensor. Dynamo, which compiles this function alone after a graph break,
    guards it instead of `func`: it guards functions, but not methods.
    """
    if torch._C._is_any_autocast_enabled():
        return _under_autocast(func, args, kwargs, method)
    if is_dynamo_compiling():
        if func is torch.autograd.backward or func is torch.autograd.grad:
            return AUTOGRAD[func](*args, **kwargs)
        operands: list[Sharded] = []
        known = [_as_specs(a, operands) for a in args], {name: _as_specs(v, operands) for name, v in kwargs.items()}
        traced: Recipe = as_dynamo_constant(_traced_recipe, func, method, *known)
        return Recipe.run(traced, operands)
    if func in AUTOGRAD:
        return AUTOGRAD[func](*args, **kwargs)
    recipe, operands = look_up(func, args, kwargs)
    return recipe.run(operands)


def look_up(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recipe, list[Sharded]]:
    """Returns the recipe of `func(*args, **kwargs)`, made on the first request, and the Sharded among its arguments."""
    operands: list[Sharded] = []
    key = (func, torch.get_default_dtype(), *[_key(a, operands) for a in args])
    if kwargs:
        key += tuple((name, _key(value, operands)) for name, value in kwargs.items())
    if not operands:
        raise InvalidTypeError(
            f"{_name(func)}: expected Sharded values as arguments, in lists, tuples or alone, got none that is found"
        )
    recipes = operands[0].spec.recipes
    try:
        recipe: Recipe | None = recipes.get(key)
    except TypeError:
        found = sorted({type(leaf).__name__ for leaf in pytree.tree_leaves((args, kwargs)) if not _has_hash(leaf)})
        raise InvalidTypeError(
            f"{_name(func)}: expected Sharded values, numbers, text, and lists of these as arguments, got "
            f"{', '.join(found)}; of an array take x.tolist() for an index, shard(torch.from_numpy(x), mesh) as value"
        ) from None
    if recipe is None:
        recipe = _make_recipe(func, args, kwargs, operands)
        if len(recipes) >= MAX_RECIPES:
            recipes.clear()
        recipes[key] = recipe
    return recipe, operands


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _traced_recipe(func: Callable[..., Any], _: str, args: Any, kwargs: Any) -> Recipe:
    """Returns the recipe, for arguments with ValueSpecs in place of Sharded values."""
    return look_up(func, _without_locals(args), _without_locals(kwargs))[0]


def _without_locals(value: Any) -> Any:
    if isinstance(value, ValueSpec):
        return Sharded(None, value)
    if type(value) is dict:
        return {name: _without_locals(item) for name, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_without_locals, value))
    return value


def _as_specs(value: Any, operands: list[Sharded]) -> Any:
    """Returns an argument with ValueSpecs in place of Sharded values, which it collects. Dynamo can trace it."""
    if isinstance(value, Sharded):
        operands.append(value)
        return value.spec
    if isinstance(value, list):
        return [_as_specs(item, operands) for item in value]
    if isinstance(value, tuple):
        return tuple([_as_specs(item, operands) for item in value])
    if isinstance(value, Tensor):
        _key(value, operands)  # raises for it
    return value


def _under_autocast(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> Any:
    """Casts the arguments as autocast would, and continues without autocast."""
    operands = _operands_of(args, kwargs)
    device = operands[0].device.type
    autocast = autocast_of(device)
    with torch.autocast(device, enabled=False):
        to = None if autocast is None else argument_dtype(func, autocast, [operand.dtype for operand in operands])

        def cast(value: Any, to: torch.dtype) -> Any:
            if type(value) in (list, tuple):
                return type(value)(cast(item, to) for item in value)
            is_cast = isinstance(value, Sharded) and value.dtype.is_floating_point
            return _cast(value, to) if is_cast and value.dtype not in (to, torch.float64) else value

        if to is not None:
            args, kwargs = [cast(a, to) for a in args], {name: cast(v, to) for name, v in kwargs.items()}
        return run_function(func, args, kwargs, method)


def _cast(value: Sharded, to: torch.dtype) -> Sharded:
    """Casts a value. A result caches its cast copies like its moved ones, so that the copy is moved once for all its
    uses."""
    cast: Sharded | None = value._cached_copy(str(to))
    if cast is None:
        cast = run_function(Tensor.to, (value, to), {}, "to")
        value._cache_copy(str(to), cast)
    return cast


def recipe_of(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Recipe:
    """Returns the recipe of `func(*args, **kwargs)`. Nothing is computed or sent."""
    operands = _operands_of(args, kwargs)
    if not operands:
        raise InvalidTypeError("recipe_of: expected a Sharded among the arguments, got none")
    return _make_recipe(func, args, kwargs, operands)


def _key(value: Any, operands: list[Sharded]) -> Any:
    """Returns the part of an argument that a recipe depends on. Collects the Sharded ones."""
    kind = type(value)
    if kind is Sharded:
        operands.append(value)
        return value.spec
    if isinstance(value, float | complex):  # 0.0 == -0.0, so the signs are part of the key
        return kind, value, math.copysign(1.0, value.real), math.copysign(1.0, value.imag)
    if isinstance(value, list | tuple):
        return kind, tuple(_key(item, operands) for item in value)
    if isinstance(value, Tensor):
        if isinstance(value, DTensor):
            raise InvalidTypeError(
                "Sharded: expected Sharded operands, got a DTensor beside them; from_dtensor takes it"
            )
        raise InvalidTypeError(
            f"Sharded: expected Sharded operands, got a plain tensor of shape {tuple(value.shape)} beside them. "
            "Call shard(x, mesh) if every rank has the same tensor, from_local(x, mesh, spec) if each has its part."
        )
    if kind is slice:
        return slice, value.start, value.stop, value.step
    return kind, value  # 1 == 1.0 == True, so the type is part of the key


def _operands_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Sharded]:
    """Returns the Sharded among the arguments."""
    operands: list[Sharded] = []
    for value in (*args, *kwargs.values()):
        _key(value, operands)
    return operands


def _make_recipe(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], operands: list[Sharded]
) -> Recipe:
    mesh = operands[0].spec.mesh
    for x in operands:
        if x.spec.mesh is not mesh:
            raise InvalidValueError(
                f"{_name(func)}: expected operands on one mesh, got {mesh} and {x.spec.mesh}; shard them again"
            )
    device = operands[0].device
    layouts = [x.layout for x in operands]
    is_in_place = _name(func).endswith("_")  # some of these are no-ops on a meta tensor
    if not is_in_place:
        program = capture(func, _as_operands(args), {k: _as_operands(v) for k, v in kwargs.items()}, device, layouts)
    if is_in_place or program.writes:
        raise UnsupportedError(
            f"{_name(func)}: expected a function that changes no Sharded, got one in place; use the form that returns "
            "a new one, or work on .local"
        )
    constants = {number: _Constant(value, mesh, device) for number, value in program.constants.items()}
    specs = {i: x.spec for i, x in enumerate(operands)} | {i: x.spec for i, x in constants.items()}
    reduced: dict[int, ValueSpec] = {}  # operands that an earlier operator had reduced, for reuse by later ones
    steps = []
    for recorded in program.steps:
        # Products gather values in their own layout.
        operand_specs = specs if is_matmul(recorded.call) else specs | reduced
        step = _make_step(recorded.call, recorded.inputs, [operand_specs[i] for i in recorded.inputs], mesh, device)
        step.numbers = recorded.outputs
        specs.update(zip(recorded.outputs, step.outputs, strict=True))
        for number, to in step.inputs:
            if to.is_reduced and not specs[number].is_reduced:
                reduced.setdefault(number, to)
        steps.append(step)
    return Recipe(program, steps, constants)


def _as_result(x: Sharded) -> Sharded:
    """Returns the operand as a function's result, which caches its moved copies."""
    is_result = x._caches_in_dynamo if is_dynamo_compiling() else x._provenance != Provenance.CALLER
    return x if is_result else Sharded(x._local, x.spec, x._deferred_matmul, provenance_of(x.spec))


def _as_operands(value: Any) -> Any:
    if isinstance(value, Sharded):
        return Operand(tuple(value.shape), value.dtype)
    if isinstance(value, list | tuple):
        items = [_as_operands(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _name(func: Callable[..., Any]) -> str:
    name = str(getattr(func, "__name__", func))
    return name.strip("_") if name.endswith("__") else name.lstrip("_")


def _adds_narrow_terms(call: AtenCall, strategy: Strategy) -> bool:
    """Returns True if the terms of a partial operand are converted to a dtype that has not all of its values, or to a
    wider one after they wrapped around: terms of uint8 are a value modulo 256."""
    return any(
        layout.partial and not all(widens(operand.dtype.to_real(), output.dtype.to_real()) for output in call.outputs)
        for operand, layout in zip(call.inputs, strategy.inputs, strict=True)
    )


def _plans(mesh: MeshComms, inputs: Sequence[ValueSpec], strategy: Strategy) -> list[Plan]:
    """Returns the plans that move the operands to the layouts of a strategy."""
    return [
        mesh.plan(spec.layout, to, spec.shape, spec.dtype.itemsize)
        for spec, to in zip(inputs, strategy.inputs, strict=True)
    ]


def _moves_anchored(inputs: Sequence[ValueSpec], plans: Sequence[Plan]) -> bool:
    return any(spec.anchored and plan.num_sends for spec, plan in zip(inputs, plans, strict=True))


def _make_step(
    call: AtenCall, numbers: Sequence[int], inputs: Sequence[ValueSpec], mesh: MeshComms, device: torch.device
) -> RecipeStep:
    """Returns the execution of one operator on inputs with these ValueSpecs."""
    if not inputs:
        outputs = [replicated_spec(mesh, o.shape, o.dtype) for o in call.outputs]
        local = local_call(call, None, [], [spec.layout for spec in outputs], mesh.rank, device)
        return RecipeStep(call, None, None, [], [], local, outputs)
    own_rule = rule_of(call)
    rule = own_rule or OpRule.opaque(call.name, [x.shape for x in call.inputs], [y.shape for y in call.outputs])
    sizes = [x.dtype.itemsize for x in (*call.inputs, *call.outputs)]
    found = propagate(rule, [spec.layout for spec in inputs], mesh.cost, sizes)
    strategy, plans = found.chosen, found.plans
    if any(spec.anchored for spec in inputs) or _adds_narrow_terms(call, strategy):
        exact = [other for other in found.strategies if not _adds_narrow_terms(call, other)]
        planned = [(other, _plans(mesh, inputs, other)) for other in exact]
        stay = [one for one in planned if not _moves_anchored(inputs, one[1])]
        if not planned:
            raise UnsupportedError(
                f"{call.name}: expected operands whose terms need not change their dtype before they are added up, got "
                f"layouts {[str(spec.layout) for spec in inputs]}; reshard the partial ones first"
            )
        strategy, plans = [*stay, *planned][0]
    needed = [spec_of(mesh, to, spec.shape, spec.dtype) for to, spec in zip(strategy.inputs, inputs, strict=True)]
    local = local_call(call, own_rule, strategy.inputs, strategy.outputs, mesh.rank, device)
    if has_sparse_gradient(call) and needed[0].layout != inputs[0].layout:
        local = refuse_sparse_gradient(call, inputs[0].layout, local)
    # A result of an anchored value only, with as many elements, is anchored too.
    stays = len(inputs) == 1 and inputs[0].anchored and not plans[0].num_sends
    outputs = [
        spec_of(mesh, layout, o.shape, o.dtype, stays and math.prod(o.shape) == inputs[0].shape.numel())
        for layout, o in zip(strategy.outputs, call.outputs, strict=True)
    ]
    step = RecipeStep(call, found, strategy, plans, list(zip(numbers, needed, strict=True)), local, outputs)
    if is_matmul(call):
        step.sizes = local_sizes(needed[0], needed[1], call)
        step.uneven = uneven_shards(needed[1])
        step.gathers = make_gather_matmul(call, plans[0], inputs[0], needed[0], step.sizes, step.uneven)
        step.is_deferred_matmul = bool(set(outputs[0].layout.partial) - set(inputs[0].layout.partial))
    return step
