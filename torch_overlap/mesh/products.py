"""Products of matrices that hide their communication.

    gather + product     x [.., S/n, .., k] needed whole  -> all_gather_matmul, which also leaves the gathered x
    product + scatter    pending, needed in parts          -> matmul_reduce_scatter
    product + reduction  pending, needed whole             -> matmul_all_reduce

A product whose result is pending is not computed before somebody needs it: only then is it known whether the sum ends
scattered or whole. The cost model says whether hiding pays; `choosing` forces an answer, `choices` tells them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class Choice:
    """How one product ran.

    Attributes:
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        fused: Did it run as that operator? Else one after the other.
        sizes: Rows, columns and inner size of the local product.
        plain, overlapped: Seconds of the two, by the cost model.
        why: What decided.
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


def _fuses(op: str, step: Step, sizes: tuple[int, int, int], spec: Spec, algorithm: str) -> bool:
    """Is the product better fused with this step?"""
    links = spec.mesh.mesh.links(step.axes)
    apart, together = times(spec.mesh.cost, step.kind, links, step.bytes, sizes, spec.dtype.itemsize)
    fused, why = (algorithm == "fused", "asked for") if algorithm != "auto" else (together < apart, "cost")
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


def _single(plan: Plan, kind: str) -> Step | None:
    """The only step that the plan has, if it is of this kind."""
    return plan.steps[0] if len(plan.steps) == 1 and plan.steps[0].kind == kind else None


def _in_order(step: Step, mesh: Any) -> bool:
    """Are the parts in the order of the communicator's ranks?"""
    names = list(mesh.axes)
    places = [names.index(axis) for axis in step.axes if ":" not in axis]
    return len(places) == len(step.axes) and places == sorted(places)


def _divides(layout: Layout, shape: Sequence[int], dim: int) -> bool:
    return shape[dim] % ranks_of(layout.mesh, layout.dims[dim]) == 0


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

    def __init__(self, call: Call, step: Step, source: Spec, target: Spec, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self._call, self._step, self._source, self._target, self._sizes = call, step, source, target, sizes
        self._dim = step.dim

    def group(self, algorithm: str) -> tuple[str, int] | None:
        """The communicator's name and size; None where it is not to be fused."""
        comm = self._source.mesh.group_comm(self._step.axes)
        if comm is None or not _fuses("all_gather_matmul", self._step, self._sizes, self._source, algorithm):
            return None
        return comm.get_name(), comm.get_size()

    def run(self, x: Sharded, rest: Sequence[Tensor]) -> Tensor | None:
        """The local result; None where it is not to be fused. Leaves the gathered operand with `x`."""
        if x._copy(self._target.text) is not None or any(map(is_batchedtensor, (x.local, *rest))):
            return None
        group = asked(GatherProduct.group, self, _algorithm())
        if group is None:
            return None
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
    call: Call, plan: Plan, spec: Spec, target: Spec, sizes: tuple[int, int, int]
) -> GatherProduct | None:
    """The fused form of a call whose first operand moves by `plan`, if there is one."""
    step = _single(plan, "all_gather")
    if step is None or step.dim == len(spec.shape) - 1 or not _in_order(step, spec.mesh.mesh):
        return None
    invariant = {name.split(":")[0] for name in step.after.invariant}
    if invariant & set(step.axes) or not _divides(spec.layout, spec.shape, step.dim):
        return None
    return GatherProduct(call, step, spec, target, sizes)


# --- product + reduction ------------------------------------------------------------------------


def _ending(
    spec: Spec, target: Spec, sizes: tuple[int, int, int], algorithm: str
) -> tuple[str, tuple[str, int], int] | None:
    """The fused operator that a pending product ends with: its kind, the communicator's name and size, a dimension.

    Kinds: "scatter", "total", and "sum", a total whose gradient is whole.
    """
    plan = spec.mesh.plan(spec.layout, target.layout, spec.shape, spec.dtype.itemsize)
    scatter, total = _single(plan, "reduce_scatter"), _single(plan, "all_reduce")
    step = scatter or total
    if step is None or step.reduce != "sum" or not _in_order(step, spec.mesh.mesh):
        return None
    comm = spec.mesh.group_comm(step.axes)
    if comm is None:
        return None
    kind, dim, op = "scatter", step.dim, "matmul_reduce_scatter"
    if scatter is not None:
        if dim == len(spec.shape) - 1 or not _divides(target.layout, spec.shape, dim):
            return None
    else:
        invariant = {name.split(":")[0] for name in step.after.invariant} & set(step.axes)
        if invariant and invariant != set(step.axes):
            return None
        kind, op = "sum" if invariant else "total", "matmul_all_reduce"
    if not _fuses(op, step, sizes, spec, algorithm):
        return None
    return kind, (comm.get_name(), comm.get_size()), dim


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
        if any(map(is_batchedtensor, self._operands)):
            return None
        how = asked(_ending, spec, target, self._step.sizes, _algorithm())
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
