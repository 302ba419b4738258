"""Products over buffers of the overlap classes, by their methods and by the operator `gemm` over the same buffers.

They are compared with our operator ("auto"), the collective before or after the product, and torch's fused operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap.tools.bench.cases import Case
from torch_overlap.tools.bench.gemms import ag_gemm_of, gemm_rs_of
from torch_overlap.tools.bench.libraries import Libraries, Library
from torch_overlap.tools.bench.problem import Call, Operands, Problem, add_libraries, add_ours
from torch_overlap.tools.bench.ranks import Ranks

_METHODS = {"ring": Method.RING_EXCHANGE, "pipeline": Method.PIPELINE, "bulk": Method.BULK}
_AG_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " kernels": {"use_ce": False, "num_comm_sm": 8},
    " aggregate": {"aggregate_ag": True},
    " atomic": {"atomic_gemm": True},
}
# Names that --algorithm may have in addition to the operator's own.
CLASS_NAMES = {
    "ag_gemm_classes": (*(f"class ring{name}" for name in _AG_OPTIONS), "gemm ring"),
    "gemm_rs_classes": ("class ring", "class ring atomic", "gemm ring", "class pipeline", "class pipeline atomic",
                        "gemm pipeline"),
    "bulk_ag": ("class bulk", "gemm bulk", "class bulk copy engine"),
    "bulk_rs": ("class bulk", "gemm bulk"),
}  # fmt: skip


class _Buffer(NamedTuple):
    """A buffer of the registry, destroyed at the end of its problem."""

    id: int
    core: Any
    type: Type
    method: Method

    def gemm(self, made: Operands, x: Tensor, weight: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns output and aux_out of the operator."""
        of_x, of_weight = (made.scale(x), made.scale(weight)) if made.is_fp8 else (None, None)
        output, _, _, aux_out = to.ops.gemm(
            x, of_x, weight, of_weight, aux_in=other, scaling_mode=made.mode, comm_overlap_method=int(self.method),
            comm_type=int(self.type), comm_overlap_id=self.id, rhs_transposed=True, out_dtype=made.out_dtype,
        )  # fmt: skip
        return output, aux_out


def _scales(made: Operands, weight: Tensor, x: Tensor) -> dict[str, Any]:
    if not made.is_fp8:
        return {}
    return {"scaling_mode": made.mode, "A_scale_inv": made.scale(weight), "B_scale_inv": made.scale(x)}


def _add(problem: Problem, ranks: Ranks, wanted: Sequence[str], names: Sequence[str], kind: Type, method: str,
         shape: tuple[int, int], dtype: torch.dtype, make_calls: Callable[[_Buffer], Sequence[Call]],
         **options: Any) -> None:  # fmt: skip
    """Adds a buffer and its variants by name, or the reason if it cannot be made. Collective."""
    if wanted and not set(wanted) & set(names):
        return
    try:
        id = to.create_comm_overlap_buffer(ranks.comm, kind, _METHODS[method], shape, dtype, **options)
    except to.Error as error:  # on all ranks
        problem.missing.update(dict.fromkeys(names, str(error)))
        return
    problem.cleanups.append(partial(to.destroy_comm_overlap_buffer, id))
    buffer = _Buffer(id, to.comm_overlap_buffer(id), kind, _METHODS[method])
    for name, call in zip(names, make_calls(buffer), strict=False):
        if not wanted or name in wanted:
            problem.add(name, "ours", call)


def _keep_wanted(problem: Problem, wanted: Sequence[str]) -> Problem:
    problem.variants = [v for v in problem.variants if v.role != "ours" or not wanted or v.name in wanted]
    return problem


def ag_gemm_classes(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    problem, made, (xs, ws) = ag_gemm_of(case, ranks, libraries, ("auto",))
    (m, n, k), sets = case.local(ranks.size), len(xs)
    out = made.empty(m, n)

    def make_calls(buffer: _Buffer) -> Sequence[Call]:
        core = buffer.core
        run = core.atomic_gemm_overlap_ag if core.is_atomic_gemm() else core.split_overlap_ag

        def call_method(i: int) -> Tensor:
            run(ws[i % sets], True, xs[i % sets], False, out, **_scales(made, ws[i % sets], xs[i % sets]))
            return out

        return call_method, lambda i: buffer.gemm(made, xs[i % sets], ws[i % sets])[0]

    for name, options in _AG_OPTIONS.items():
        names = [f"class ring{name}"] + ["gemm ring"] * (not options)
        _add(problem, ranks, wanted, names, Type.AG, "ring", (m, k), made.dtype, make_calls, **options)
    return _keep_wanted(problem, wanted)


def gemm_rs_classes(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    problem, made, (xs, ws) = gemm_rs_of(case, ranks, libraries, ("auto",))
    (m, n, _), sets = case.local(ranks.size), len(xs)
    out = made.empty(m // ranks.size, n)

    def make_calls(buffer: _Buffer) -> Sequence[Call]:
        core = buffer.core
        run = core.atomic_gemm_overlap_rs if core.is_atomic_gemm() else core.split_overlap_rs

        def call_method(i: int) -> Tensor:
            w, x = ws[i % sets], xs[i % sets]
            run(w, True, x, False, None, rs_output=out, **_scales(made, w, x))
            return out

        return call_method, lambda i: buffer.gemm(made, xs[i % sets], ws[i % sets])[0]

    for method in ("ring", "pipeline"):
        for atomic in (False, True):
            names = [f"class {method}" + " atomic" * atomic] + [f"gemm {method}"] * (not atomic)
            _add(problem, ranks, wanted, names, Type.RS, method, (m, n), made.out_dtype, make_calls, atomic_gemm=atomic)
    return _keep_wanted(problem, wanted)


def bulk(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """Returns the problem of a gradient of a column-parallel layer: dx = dy w concurrent with the gather of x for dw,
    or dw = dy^T x concurrent with the reduce-scatter of dx. A call returns the output of the collective."""
    problem, made, tp = Problem(case), Operands(case.dtype, ranks.device), ranks.size
    if made.is_fp8:
        problem.missing["all"] = "bulk_overlap_matmul takes no 8-bit floats; what travels is no operand"
        return problem
    (m, n, k), sets, (tokens, _, features) = case.local(tp), case.sets(tp), case.shape
    gathers = case.op == "bulk_ag"
    collective, rows = ("all_gather", tokens // tp) if gathers else ("reduce_scatter", tokens)
    xs = [made.random(m, k) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    others = [made.random(rows, features) for _ in range(sets)]
    product, part = made.empty(m, n), made.empty(tokens // tp, features)
    problem.add("gemm", "gemm", lambda i: made.multiply(xs[i % sets], ws[i % sets], product))

    inputs = [(x, w, other, ranks.comm) for x, w, other in zip(xs, ws, others, strict=True)]
    add_ours(problem, "bulk_overlap_matmul", inputs, (), lambda results: results[1], collective=collective)

    def calls(library: Library) -> tuple[Call, Call, None]:
        own = [library.like(other) for other in others]
        result = library.empty((tokens if gathers else tokens // tp, features), made.dtype)

        def alone(i: int) -> Tensor:
            (library.all_gather if gathers else library.reduce_scatter)(result, own[i % sets])
            return result

        def sequential(i: int) -> Tensor:
            made.multiply(xs[i % sets], ws[i % sets], product)
            return alone(i)

        return alone, sequential, None

    add_libraries(problem, libraries, collective, calls)
    problem.missing["torch fused"] = "torch has no product beside another tensor's collective"

    kind = Type.AG if gathers else Type.RS

    def make_calls(buffer: _Buffer) -> Sequence[Call]:
        core = buffer.core

        def call_method(i: int) -> Tensor:
            core.copy_into_buffer(others[i % sets], local_chunk=gathers)
            core.bulk_overlap(ws[i % sets], True, xs[i % sets], False, product, comm_type=kind,
                              rs_output=None if gathers else part)  # fmt: skip
            return core.get_buffer() if gathers else part

        return call_method, lambda i: buffer.gemm(made, xs[i % sets], ws[i % sets], others[i % sets])[1]

    shape = (tokens, features)
    _add(problem, ranks, wanted, ("class bulk", "gemm bulk"), kind, "bulk", shape, made.dtype, make_calls)
    if gathers:
        names = ("class bulk copy engine",)
        _add(problem, ranks, wanted, names, kind, "bulk", shape, made.dtype, make_calls, use_ce=True)
    return _keep_wanted(problem, wanted)
