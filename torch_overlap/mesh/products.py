"""Products of matrices that hide their communication.

    gather + product     x [.., S/n, .., k] needed whole  -> all_gather_matmul, which also leaves the gathered x
    product + scatter    pending, needed in parts          -> matmul_reduce_scatter
    product + reduction  pending, needed whole             -> matmul_all_reduce

A product whose result is pending is not computed before somebody needs it: only then is it known whether the sum ends
scattered or whole. The cost model says whether hiding pays; `choosing` forces an answer, `choices` tells them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import InvalidValueError, StateError
from torch_overlap.mesh._core import CostModel, Layout, Plan, Step
from torch_overlap.mesh.call import Call
from torch_overlap.mesh.tracing import Named, asked, is_dynamo_compiling, run_local
from torch_overlap.mesh.value_spec import ranks_of
from torch_overlap.nn._functions import sum_matmul

if TYPE_CHECKING:
    from torch_overlap.mesh.dispatch import Executed
    from torch_overlap.mesh.sharded import Sharded
    from torch_overlap.mesh.value_spec import Spec

__all__ = ["ALGORITHMS", "Choice", "GatherProduct", "PendingProduct", "choices", "choosing", "gather_product"]

_ops = torch.ops.torch_overlap

ALGORITHMS = ("auto", "plain", "fused")
_NAMES = ("linear", "matmul", "mm")
_INSIDE_VMAP = "it runs inside vmap"
Uneven = Sequence[tuple[Sequence[str], str]]  # see uneven_parts()


@dataclass(frozen=True)
class Choice:
    """How one product ran.

    Attributes:
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        fused: Did it run as that operator? Else one after the other.
        sizes: Rows, columns and inner size of the local product.
        plain, overlapped: Seconds of the two, by the cost model; infinite where it cannot run as the operator.
        why: What decided: "cost", "asked for", or what stood in the way.
    """

    op: str
    fused: bool
    sizes: tuple[int, int, int]
    plain: float
    overlapped: float
    why: str


_nothing = contextlib.nullcontext()


# What `choosing` asks for and `choices` fills, by thread. No subclass with defaults: torch 2.15's Dynamo keeps what a
# trace writes into one where nobody reads it.
_state = threading.local()


def _algorithm() -> str:
    return getattr(_state, "algorithm", "auto")


def _log() -> list[Choice] | None:
    return getattr(_state, "log", None)


@contextlib.contextmanager
def choosing(algorithm: str) -> Iterator[None]:
    """In the block, for this thread: products and their communication run fused, plain, or as is cheaper. A product
    whose sum is pending is decided where the sum ends.

    "fused" asks for it where the operands allow it: parts of one size, along a dimension that is not multiplied.
    Where they do not, `choices` has the reason.
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
    """The choices that this thread makes in the block, in order."""
    before, _state.log = _log(), []
    try:
        yield _state.log
    finally:
        _state.log = before


def _fuses(
    op: str, plan: Plan, step: Step, sizes: tuple[int, int, int], spec: Spec, algorithm: str, refusal: str | None
) -> bool:
    """Is the product better fused with this step of the plan? `refusal`: what stands in the way."""
    if refusal is None:
        links = spec.mesh.mesh.links(step.axes)
        apart, together = times(spec.mesh.cost, step.kind, links, step.bytes, sizes, spec.dtype.itemsize)
        fused, why = (algorithm == "fused", "asked for") if algorithm != "auto" else (together < apart, "cost")
    else:
        apart = spec.mesh.cost.matmul(*sizes, element_size=spec.dtype.itemsize) + plan.seconds
        together, fused, why = math.inf, False, refusal
    log = _log()
    if log is not None:
        log.append(Choice(op, fused, sizes, apart, together, why))
    return fused


def times(
    cost: CostModel, collective: str, links: Mapping[str, int], size: float, sizes: tuple[int, int, int], itemsize: int
) -> tuple[float, float]:
    """Seconds of a product and a collective of `size` bytes, one after the other and together."""
    product = cost.matmul(*sizes, element_size=itemsize)
    moved = cost.collective(collective, links, size)
    return product + moved, cost.overlapped(collective, links, size, product)


def _step(plan: Plan, *kinds: str) -> Step | None:
    """The first step of one of these kinds."""
    return next((step for step in plan.steps if step.kind in kinds), None)


def _refusal(plan: Plan, step: Step, spec: Spec, cut: Layout, uneven: Uneven) -> str | None:
    """Why a product cannot hide this step of the plan; None: it can. `cut`: where the parts are that it gathers, or
    scatters; of a value like `spec`. `uneven`: of the weight."""
    if len(plan.steps) > 1:
        return f"its value moves in several steps: {', '.join(s.kind for s in plan.steps)}"
    if step.kind != "all_reduce" and step.dim == len(spec.shape) - 1:
        return f"it {'gathers the dimension that is multiplied' if step.kind == 'all_gather' else 'scatters columns'}"
    if not _in_order(step, spec.mesh.mesh):
        return "the parts are in another order than the ranks of the communicator"
    if step.kind != "all_reduce" and spec.shape[step.dim] % ranks_of(cut.mesh, cut.dims[step.dim]):
        parts = ranks_of(cut.mesh, cut.dims[step.dim])
        return f"dimension {step.dim} of size {spec.shape[step.dim]} is not cut into {parts} parts of one size"
    # Ranks of which one has another shape than the others might take different ways.
    axes = _names(step.axes)
    return next((why for names, why in uneven if axes & set(names)), None)


def uneven_parts(weight: Spec) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The axes along which parts of a weight differ in size, and how."""
    found = []
    for dim, axes in enumerate(weight.layout.dims):
        parts = ranks_of(weight.layout.mesh, axes)
        if weight.shape[dim] % parts:
            why = f"dimension {dim} of the weight of size {weight.shape[dim]} is not cut into {parts} parts of one size"
            found.append((tuple(sorted(_names(axes))), why))
    return tuple(found)


def _names(axes: Iterable[str]) -> set[str]:
    """Of axes, or parts of axes."""
    return {axis.split(":")[0] for axis in axes}


def _in_order(step: Step, mesh: Any) -> bool:
    """Are the parts in the order of the communicator's ranks?"""
    names = list(mesh.axes)
    places = [names.index(axis) for axis in step.axes if ":" not in axis]
    return len(places) == len(step.axes) and places == sorted(places)


def _as_linear(call: Call, weight: Tensor) -> Tensor:
    """The weight as [out, in]."""
    return weight if call.name == "linear" else weight.t()


def local_sizes(x: Spec, weight: Spec, call: Call) -> tuple[int, int, int]:
    """Rows, columns and inner size of the product of the largest parts: the same on every rank, as choices must be."""
    rows, (out, inner) = 1, weight.largest_shape
    for n in x.largest_shape[:-1]:
        rows *= n
    return (rows, out, inner) if call.name == "linear" else (rows, inner, out)


# --- gather + product ---------------------------------------------------------------------------


class GatherProduct(Named):
    """A product whose first operand has to be gathered along a dimension that is not multiplied."""

    def __init__(
        self,
        call: Call,
        plan: Plan,
        step: Step,
        source: Spec,
        target: Spec,
        sizes: tuple[int, int, int],
        uneven: Uneven,
    ) -> None:
        super().__init__()
        self._call, self._plan, self._step, self._sizes = call, plan, step, sizes
        self._source, self._target, self._dim = source, target, step.dim
        self._refusal = _refusal(plan, step, source, source.layout, uneven)
        if self._refusal is None and _invariant_axes(step):
            self._refusal = "what it gathers is invariant, and so is the gradient"

    def group(self, algorithm: str, is_mapped: bool) -> tuple[str, int] | None:
        """The communicator's name and size; None where it is not to be fused."""
        comm = self._source.mesh.group_comm(self._step.axes)
        refusal = _INSIDE_VMAP if is_mapped else self._refusal
        if comm is None or not _fuses(
            "all_gather_matmul", self._plan, self._step, self._sizes, self._source, algorithm, refusal
        ):
            return None
        return comm.get_name(), comm.get_size()

    def decide(self, x: Sharded, others: Sequence[Sharded]) -> tuple[str, int] | None:
        """The communicator's name and size where the product of these is to be fused. Nothing is moved."""
        if x._copy(self._target.text) is not None:
            return None
        group: tuple[str, int] | None = asked(
            GatherProduct.group, self, _algorithm(), any(map(_is_mapped, (x, *others)))
        )
        return group

    def run(self, x: Sharded, rest: Sequence[Tensor], group: tuple[str, int]) -> Tensor:
        """The local result. Leaves the gathered operand with `x`."""
        weight, bias = _as_linear(self._call, rest[0]), rest[1] if len(rest) > 1 else None
        keeps = x._keeps()
        (out,), gathered = _ops.all_gather_matmul(
            x.local, [weight], [] if bias is None else [bias], *group, self._dim, keeps, "auto"
        )
        if keeps:
            if not is_dynamo_compiling() and torch.is_grad_enabled() and x.local.requires_grad:
                gathered = _Gathered.apply(x.local, gathered.detach(), *group, self._dim)  # type: ignore[no-untyped-call]
            x._remember(self._target.text, gathered)
        result: Tensor = out
        return result


def _is_mapped(value: Sharded) -> bool:
    """Is it a value inside vmap?"""
    if value._local is not None:
        return is_batchedtensor(value._local)
    return value._product is not None and any(map(is_batchedtensor, value._product._operands))


class _Gathered(torch.autograd.Function):
    """What a product gathered, for others: a gather of its own in the graph, beside the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, comm: str, size: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = (comm, size), dim
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _ops.reduce_scatter(grad, ctx.dim, "sum", *ctx.group), None, None, None, None


def gather_product(
    call: Call, plan: Plan, spec: Spec, target: Spec, sizes: tuple[int, int, int], uneven: Uneven
) -> GatherProduct | None:
    """The form of a call that gathers its first operand, which moves by `plan`; None where nothing is gathered."""
    step = _step(plan, "all_gather")
    return None if step is None else GatherProduct(call, plan, step, spec, target, sizes, uneven)


def _invariant_axes(step: Step) -> set[str]:
    """Those of the step along which its result is invariant."""
    return {name.split(":")[0] for name in step.after.invariant} & set(step.axes)


# --- product + reduction ------------------------------------------------------------------------


def _ending(
    spec: Spec, target: Spec, sizes: tuple[int, int, int], uneven: Uneven, algorithm: str, is_mapped: bool
) -> tuple[str, tuple[str, int], int] | None:
    """The fused operator that a pending product ends with: its kind, the communicator's name and size, a dimension.

    Kinds: "scatter", "total", and "sum", a total whose gradient is whole.
    """
    plan = spec.mesh.plan(spec.layout, target.layout, spec.shape, spec.dtype.itemsize)
    step = _step(plan, "reduce_scatter", "all_reduce")
    if step is None:
        return None
    comm = spec.mesh.group_comm(step.axes)
    if comm is None:
        return None
    refusal = _INSIDE_VMAP if is_mapped else _refusal(plan, step, spec, target.layout, uneven)
    kind, op, invariant = "scatter", "matmul_reduce_scatter", _invariant_axes(step)
    if step.kind == "all_reduce":
        kind, op = "sum" if invariant else "total", "matmul_all_reduce"
        if refusal is None and invariant and invariant != set(step.axes):
            refusal = "its gradient is whole along some of the axes"
    if refusal is None and step.reduce != "sum":
        refusal = f"it is no sum but {step.reduce}"
    if not _fuses(op, plan, step, sizes, spec, algorithm, refusal):
        return None
    return kind, (comm.get_name(), comm.get_size()), step.dim


class PendingProduct:
    """A product that is pending along some axes, and not computed yet.

    Its operands must not change until it is: an operand that did is an error.
    """

    def __init__(self, step: Executed, operands: Sequence[Tensor], bias: Sharded | None) -> None:
        self._step, self._operands, self._bias = step, list(operands), bias
        watched = [] if is_dynamo_compiling() or torch.is_inference_mode_enabled() else operands[:2]
        self._versions = [(t, t._version) for t in watched if not t.is_inference()]
        self._grad = torch.is_grad_enabled()

    @property
    def requires_grad(self) -> bool:
        return self._grad and any(t.requires_grad for t in self._operands)

    def compute(self) -> Tensor:
        """The pending local tensor."""
        with self._as_called():
            if is_dynamo_compiling():
                out: Tensor = run_local(self._step.traced_name, self._operands)
            else:
                out = self._step.local(self._operands)
        return out

    def ended(self, spec: Spec, target: Spec) -> Tensor | None:
        """The local tensor under `target`, where that is one fused operator."""
        is_mapped = any(map(is_batchedtensor, self._operands))
        how = asked(_ending, spec, target, self._step.sizes, self._step.uneven, _algorithm(), is_mapped)
        if how is None:
            return None
        kind, group, dim = how
        with self._as_called():
            x, weight = self._operands[0], _as_linear(self._step.call, self._operands[1])
            if kind == "scatter":
                out = _ops.matmul_reduce_scatter(x, weight, None, *group, dim, "sum", "auto")
            elif kind == "sum":
                out = sum_matmul(x, weight, None, group, "auto")
            else:
                out = _ops.matmul_all_reduce(x, weight, None, *group, "sum", "auto")
        return out if self._bias is None else self._with_bias(out, target)

    def _with_bias(self, out: Tensor, target: Spec) -> Tensor:
        from torch_overlap.mesh.sharded import Sharded

        assert self._bias is not None
        with self._as_called():
            added: Sharded = torch.add(Sharded(out, target), self._bias)  # type: ignore[call-overload]
            return added._moved(target)

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        for tensor, version in () if is_dynamo_compiling() else self._versions:
            if tensor._version != version:
                raise StateError(
                    f"{self._step.call.name}: expected operands that stay as they are until the product is needed, got "
                    "one that changed in place; take .local of the result first, or reshard it"
                )
        device = self._operands[0].device.type
        cast = torch._C._is_any_autocast_enabled()  # the operands were cast before, if they had to be
        with torch.set_grad_enabled(self._grad), torch.autocast(device, enabled=False) if cast else _nothing:
            yield


def is_product(call: Call) -> bool:
    """May the call be fused with what its result needs?"""
    return call.name in _NAMES and len(call.inputs[1].shape) == 2 and len(call.inputs[0].shape) >= 2


def linear(x: Sharded, weight: Sharded, bias: Sharded | None = None, *, out: Any = None) -> Sharded:
    """nn.functional.linear with its result in a layout of one's choice: any spelling of one; None: as it comes."""
    y: Sharded = F.linear(x, weight, bias)  # type: ignore[arg-type, assignment]
    return y if out is None else y.reshard(out)
