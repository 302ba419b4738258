"""Matrix products that overlap with their communication.

    x is sharded by rows, needed whole      all_gather_matmul, which also returns the gathered x
    the result is partial, needed sharded   matmul_reduce_scatter
    the result is partial, needed whole     matmul_all_reduce

A product with a partial result is not computed until it is needed: only then is it known if the sum ends scattered or
whole. The operator chooses its algorithm, which may be to communicate and multiply one after the other; `choosing`
keeps products away from it, and `choices` reports the decisions.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import InvalidValueError, StateError
from torch_overlap.mesh._core import Layout, Plan, Step
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.dynamo import DynamoConstant, as_dynamo_constant, is_dynamo_compiling, run_in_graph
from torch_overlap.mesh.value_spec import ranks_of
from torch_overlap.nn.functional import sum_matmul

if TYPE_CHECKING:
    from torch_overlap.mesh.dispatch import RecipeStep
    from torch_overlap.mesh.sharded import Sharded
    from torch_overlap.mesh.value_spec import ValueSpec

__all__ = ["ALGORITHMS", "Choice", "DeferredMatmul", "GatherMatmul", "choices", "choosing", "make_gather_matmul"]

_ops = torch.ops.torch_overlap

ALGORITHMS = ("auto", "sequential")
_NAMES = ("linear", "matmul", "mm")
_INSIDE_VMAP = "it runs inside vmap"
UnevenShards = Sequence[tuple[Sequence[str], str]]  # see uneven_shards()


@dataclass(frozen=True)
class Choice:
    """The execution of one product.

    Attributes:
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        overlapped: True if it ran as that operator, False if it ran as a product and a collective.
        sizes: Rows, columns and inner size of the local product.
        why: "auto", "asked for", or why it cannot run as the operator.
    """

    op: str
    overlapped: bool
    sizes: tuple[int, int, int]
    why: str


_null_context = contextlib.nullcontext()


# Set by `choosing` and `choices`, per thread. It must not be a subclass with defaults: torch 2.15's Dynamo stores what
# a trace writes into such a class elsewhere.
_state = threading.local()


def _algorithm() -> str:
    return getattr(_state, "algorithm", "auto")


def _log() -> list[Choice] | None:
    return getattr(_state, "log", None)


@contextlib.contextmanager
def choosing(algorithm: str) -> Iterator[None]:
    """Inside the block, for this thread, selects how products and their communication run. A partial product is decided
    where the sum ends.

    "auto", the default: as one operator if the operands allow it (parts of the same size, along a dimension that is not
    multiplied); `explain` tells which algorithm the operator then chooses. Otherwise `choices` has the reason.
    "sequential": as a product and a collective.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidValueError(f"choosing: expected one of {ALGORITHMS}, got {algorithm!r}")
    before, _state.algorithm = _algorithm(), algorithm
    try:
        yield
    finally:
        _state.algorithm = before


@contextlib.contextmanager
def choices() -> Iterator[list[Choice]]:
    """Yields a list of the choices that this thread makes inside the block, in order."""
    before, _state.log = _log(), []
    try:
        yield _state.log
    finally:
        _state.log = before


def _should_overlap(op: str, sizes: tuple[int, int, int], algorithm: str, unsupported_reason: str | None) -> bool:
    """Returns True if the product is to run as the operator. `unsupported_reason`: why it cannot."""
    overlapped, why = unsupported_reason is None, unsupported_reason or "auto"
    if overlapped and algorithm == "sequential":
        overlapped, why = False, "asked for"
    log = _log()
    if log is not None:
        log.append(Choice(op, overlapped, sizes, why))
    return overlapped


def _step(plan: Plan, *kinds: str) -> Step | None:
    """Returns the first step of one of these kinds."""
    return next((step for step in plan.steps if step.kind in kinds), None)


def _unsupported_reason(plan: Plan, step: Step, spec: ValueSpec, sharded: Layout, uneven: UnevenShards) -> str | None:
    """Returns the reason why a product cannot overlap with this step of the plan, or None. `sharded`: the layout
    that is gathered, or that the result is scattered to, of a value like `spec`. `uneven`: of the weight."""
    if len(plan.steps) > 1:
        return f"its value moves in several steps: {', '.join(s.kind for s in plan.steps)}"
    if step.kind != "all_reduce" and step.dim == len(spec.shape) - 1:
        return f"it {'gathers the dimension that is multiplied' if step.kind == 'all_gather' else 'scatters columns'}"
    if not _is_in_rank_order(step, spec.mesh.mesh):
        return "the parts are in another order than the ranks of the communicator"
    if step.kind != "all_reduce" and spec.shape[step.dim] % ranks_of(sharded.mesh, sharded.dims[step.dim]):
        parts = ranks_of(sharded.mesh, sharded.dims[step.dim])
        return f"dimension {step.dim} of size {spec.shape[step.dim]} is not cut into {parts} parts of one size"
    # Ranks with another weight shape than the others might select another algorithm.
    axes = _axis_names(step.axes)
    return next((why for names, why in uneven if axes & set(names)), None)


def uneven_shards(weight: ValueSpec) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Returns the axes along which parts of a weight differ in size, with the reason."""
    found = []
    for dim, axes in enumerate(weight.layout.dims):
        parts = ranks_of(weight.layout.mesh, axes)
        if weight.shape[dim] % parts:
            why = f"dimension {dim} of the weight of size {weight.shape[dim]} is not cut into {parts} parts of one size"
            found.append((tuple(sorted(_axis_names(axes))), why))
    return tuple(found)


def _axis_names(axes: Iterable[str]) -> set[str]:
    """Returns the names of axes, or of parts of axes."""
    return {axis.split(":")[0] for axis in axes}


def _is_in_rank_order(step: Step, mesh: Any) -> bool:
    """Returns True if the parts are in the order of the communicator's ranks."""
    names = list(mesh.axes)
    places = [names.index(axis) for axis in step.axes if ":" not in axis]
    return len(places) == len(step.axes) and places == sorted(places)


def _as_linear(call: AtenCall, weight: Tensor) -> Tensor:
    """Returns the weight as [out, in]."""
    return weight if call.name == "linear" else weight.t()


def local_sizes(x: ValueSpec, weight: ValueSpec, call: AtenCall) -> tuple[int, int, int]:
    """Returns rows, columns and inner size of the product of the largest parts: the same on every rank, as choices must
    be."""
    rows, (out, inner) = math.prod(x.largest_shape[:-1]), weight.largest_shape
    return (rows, out, inner) if call.name == "linear" else (rows, inner, out)


# --- all-gather + matmul ------------------------------------------------------------------------


class GatherMatmul(DynamoConstant):
    """A product whose first operand must be gathered along a dimension that is not multiplied."""

    def __init__(
        self,
        call: AtenCall,
        plan: Plan,
        step: Step,
        source: ValueSpec,
        target: ValueSpec,
        sizes: tuple[int, int, int],
        uneven: UnevenShards,
    ) -> None:
        super().__init__()
        self._call, self._step, self._sizes = call, step, sizes
        self._source, self._target, self._dim = source, target, step.dim
        self._unsupported_reason = _unsupported_reason(plan, step, source, source.layout, uneven)
        if self._unsupported_reason is None and _invariant_axes(step):
            self._unsupported_reason = "what it gathers is invariant, and so is the gradient"

    def overlapping_group(self, algorithm: str, is_in_vmap: bool) -> tuple[str, int] | None:
        """Returns the communicator's name and size; None if it runs as a product and a collective."""
        comm = self._source.mesh.group_comm(self._step.axes)
        unsupported_reason = _INSIDE_VMAP if is_in_vmap else self._unsupported_reason
        if comm is None or not _should_overlap("all_gather_matmul", self._sizes, algorithm, unsupported_reason):
            return None
        return comm.get_name(), comm.get_size()

    def select_group(self, x: Sharded, others: Sequence[Sharded]) -> tuple[str, int] | None:
        """Returns the communicator's name and size if the product of these is to run as the operator.
        Nothing is moved."""
        if x._cached_copy(self._target.text) is not None:
            return None
        group: tuple[str, int] | None = as_dynamo_constant(
            GatherMatmul.overlapping_group, self, _algorithm(), any(map(_is_in_vmap, (x, *others)))
        )
        return group

    def run(self, x: Sharded, rest: Sequence[Tensor], group: tuple[str, int]) -> Tensor:
        """Returns the local result. Caches the gathered operand in `x`."""
        weight, bias = _as_linear(self._call, rest[0]), rest[1] if len(rest) > 1 else None
        local, keeps = x._used_local(), x._should_cache_copies()
        (out,), gathered = _ops.all_gather_matmul(
            local, [weight], [] if bias is None else [bias], *group, self._dim, keeps, "auto"
        )
        if keeps:
            if not is_dynamo_compiling() and torch.is_grad_enabled() and local.requires_grad:
                gathered = _Gathered.apply(local, gathered.detach(), *group, self._dim)  # type: ignore[no-untyped-call]
            x._cache_copy(self._target.text, gathered, self._target)
        result: Tensor = out
        return result


def _is_in_vmap(value: Sharded) -> bool:
    """Returns True if the value is inside vmap."""
    if value._local is not None:
        return is_batchedtensor(value._local)
    return value._deferred_matmul is not None and any(map(is_batchedtensor, value._deferred_matmul._operands))


class _Gathered(torch.autograd.Function):
    """Makes the gathered operand of a product available to other operators: a separate gather in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, comm: str, size: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = (comm, size), dim
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _ops.reduce_scatter(grad, ctx.dim, "sum", *ctx.group), None, None, None, None


def make_gather_matmul(
    call: AtenCall, plan: Plan, spec: ValueSpec, target: ValueSpec, sizes: tuple[int, int, int], uneven: UnevenShards
) -> GatherMatmul | None:
    """Returns the variant of a call that gathers its first operand, which moves by `plan`; None if nothing is
    gathered."""
    step = _step(plan, "all_gather")
    return None if step is None else GatherMatmul(call, plan, step, spec, target, sizes, uneven)


def _invariant_axes(step: Step) -> set[str]:
    """Returns the axes of the step along which its result is invariant."""
    return _axis_names(step.after.invariant) & set(step.axes)


# --- matmul + reduce-scatter or all-reduce ------------------------------------------------------


def _select_reduction(
    spec: ValueSpec,
    target: ValueSpec,
    sizes: tuple[int, int, int],
    uneven: UnevenShards,
    algorithm: str,
    is_in_vmap: bool,
) -> tuple[str, tuple[str, int], int] | None:
    """Returns what completes a partial product: the name of an operator, or "sum_matmul" (an all-reduce whose gradient
    is whole); the communicator's name and size; a dimension."""
    plan = spec.mesh.plan(spec.layout, target.layout, spec.shape, spec.dtype.itemsize)
    step = _step(plan, "reduce_scatter", "all_reduce")
    if step is None:
        return None
    comm = spec.mesh.group_comm(step.axes)
    if comm is None:
        return None
    unsupported_reason = _INSIDE_VMAP if is_in_vmap else _unsupported_reason(plan, step, spec, target.layout, uneven)
    name = op = "matmul_reduce_scatter"
    invariant = _invariant_axes(step)
    if step.kind == "all_reduce":
        op = "matmul_all_reduce"
        name = "sum_matmul" if invariant else op
        if unsupported_reason is None and invariant and invariant != set(step.axes):
            unsupported_reason = "its gradient is whole along some of the axes"
    if unsupported_reason is None and step.reduce != "sum":
        unsupported_reason = f"it is no sum but {step.reduce}"
    if not _should_overlap(op, sizes, algorithm, unsupported_reason):
        return None
    return name, (comm.get_name(), comm.get_size()), step.dim


class DeferredMatmul:
    """A product that is partial along some axes, and not computed yet.

    Its operands, and its bias, must not change before it is: a changed one is an error.

    Attributes:
        is_traced: True if it was made under torch.compile.
    """

    def __init__(self, step: RecipeStep, operands: Sequence[Tensor], bias: Sharded | None) -> None:
        self._step, self._operands, self.is_traced = step, list(operands), is_dynamo_compiling()
        self._bias = None if bias is None else bias._with_local(bias.local, bias.spec)
        watched = [] if self.is_traced else [*operands, *([] if bias is None else [bias.local])]
        self._versions = [(t, t._version) for t in watched if not t.is_inference()]
        self._grad = torch.is_grad_enabled()

    @property
    def requires_grad(self) -> bool:
        return self._grad and any(t.requires_grad for t in self._operands)

    def has_changed_operands(self) -> bool:
        """Returns True if an operand was changed in place since."""
        return any(tensor._version != version for tensor, version in self._versions)

    def compute(self) -> Tensor:
        """Returns the partial local tensor. torch counts the writes to it, also if this runs in inference mode."""
        if is_dynamo_compiling():
            with self._with_call_state():
                out: Tensor = run_in_graph(self._step.constant_name, self._operands)
            return out
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else _null_context, self._with_call_state():
            out = self._step.run_local(self._operands)
        return out

    def reduced_result(self, spec: ValueSpec, target: ValueSpec) -> Tensor | None:
        """Returns the local tensor under `target` if one overlapped operator computes it, else None."""
        is_in_vmap = any(map(is_batchedtensor, self._operands))
        how = as_dynamo_constant(
            _select_reduction, spec, target, self._step.sizes, self._step.uneven, _algorithm(), is_in_vmap
        )
        if how is None:
            return None
        name, group, dim = how
        out: Tensor
        with self._with_call_state():
            x, weight = self._operands[0], _as_linear(self._step.call, self._operands[1])
            if name == "matmul_reduce_scatter":
                out = _ops.matmul_reduce_scatter(x, weight, None, *group, dim, "sum", "auto")
            elif name == "sum_matmul":
                out = sum_matmul(x, weight, None, group, "auto")
            else:
                out = _ops.matmul_all_reduce(x, weight, None, *group, "sum", "auto")
            if self._bias is not None:
                added: Sharded = torch.add(self._bias._with_local(out, target), self._bias)  # type: ignore[call-overload]
                out = added._local_under(target)
        return out

    @contextlib.contextmanager
    def _with_call_state(self) -> Iterator[None]:
        if not is_dynamo_compiling() and self.has_changed_operands():
            raise StateError(
                f"{self._step.call.name}: expected operands that stay as they are until the product is needed, got one "
                "that changed in place; take .local of the result first, or reshard it"
            )
        device = self._operands[0].device.type
        cast = torch._C._is_any_autocast_enabled()  # the operands are already cast, if necessary
        with torch.set_grad_enabled(self._grad), torch.autocast(device, enabled=False) if cast else _null_context:
            yield


def is_matmul(call: AtenCall) -> bool:
    """Returns True if the call may be fused with communication."""
    return call.name in _NAMES and len(call.inputs[1].shape) == 2 and len(call.inputs[0].shape) >= 2


def linear(x: Sharded, weight: Sharded, bias: Sharded | None = None, *, out: Any = None) -> Sharded:
    """Computes nn.functional.linear with its result in a given layout: any spelling of one; None leaves it as
    computed."""
    y: Sharded = F.linear(x, weight, bias)  # type: ignore[arg-type, assignment]
    return y if out is None else y.reshard(out)
