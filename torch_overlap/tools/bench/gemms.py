"""Products with their communication: ours, and a library's collective before or after the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_overlap as to
from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap.tools.bench.cases import Case
from torch_overlap.tools.bench.libraries import Arena, Libraries, Library
from torch_overlap.tools.bench.problem import (
    Call,
    Operands,
    Problem,
    add_libraries,
    add_product,
    add_torch_all_reduces,
    add_torch_fused,
    call_named,
)
from torch_overlap.tools.bench.ranks import Ranks

NORM_EPS = 1e-6


_OperandsAndProblem = tuple[Problem, Operands, tuple[list[Tensor], list[Tensor]]]


def ag_gemm(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    return ag_gemm_of(case, ranks, libraries, wanted)[0]


def ag_gemm_of(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> _OperandsAndProblem:
    """Returns the problem, with its x and weights."""
    problem, made, comm, tp = Problem(case), Operands(case.dtype, ranks.device), ranks.comm, ranks.size
    (m, n, k), sets = case.local(tp), case.sets(tp)
    xs = [made.random(m // tp, k) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    whole, out = made.random(m, k), made.empty(m, n)
    problem.add("gemm", "gemm", lambda i: made.multiply(whole, ws[i % sets], out))

    add_product(problem, made, "all_gather_matmul", xs, ws, comm, wanted)

    def calls(library: Library) -> tuple[Call, Call, None]:
        own, gathered = [library.like(x) for x in xs], library.empty((m, k), made.dtype)

        def alone(i: int) -> Tensor:
            library.all_gather(gathered, own[i % sets])
            return gathered

        return alone, lambda i: made.multiply(alone(i), ws[i % sets], out), None

    add_libraries(problem, libraries, "all_gather", calls)

    def fused(group: str, i: int) -> Tensor:
        x, w = xs[i % sets], ws[i % sets].t()
        if not made.is_fp8:
            _, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group, return_A=False)
        else:
            scale_x, scale_w = made.torch_scales(x, ws[i % sets])
            _, products = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                x, [w], scale_x, [scale_w], 0, group, [None], [None], [made.out_dtype], [True]
            )
        product: Tensor = products[0]
        return product

    add_torch_fused(problem, libraries, fused)
    return problem, made, (xs, ws)


def _reduction(case: Case, ranks: Ranks, libraries: Libraries, collective: str) -> _OperandsAndProblem:
    """Returns the common part of gemm_rs and gemm_ar: the product, followed by the collective of every library."""
    problem, made, tp = Problem(case), Operands(case.dtype, ranks.device), ranks.size
    (m, n, k), sets = case.local(tp), case.sets(tp)
    xs = [made.random(m, k) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    whole = made.empty(m, n)
    problem.add("gemm", "gemm", lambda i: made.multiply(xs[i % sets], ws[i % sets], whole))

    def calls(library: Library) -> tuple[Call, Call, Callable[[], object] | None]:
        partial_sums = library.empty((m, n), made.out_dtype)
        part = library.empty((m // tp, n), made.out_dtype) if collective == "reduce_scatter" else partial_sums
        made.multiply(xs[0], ws[0], partial_sums)

        def alone(i: int) -> Tensor:
            if collective == "reduce_scatter":
                library.reduce_scatter(part, partial_sums)
            else:
                library.all_reduce(partial_sums)
            return part

        def sequential(i: int) -> Tensor:
            made.multiply(xs[i % sets], ws[i % sets], partial_sums)
            return alone(i)

        again = partial(made.multiply, xs[0], ws[0], partial_sums) if collective == "all_reduce" else None
        return alone, sequential, again

    add_libraries(problem, libraries, collective, calls)
    return problem, made, (xs, ws)


def gemm_rs(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    return gemm_rs_of(case, ranks, libraries, wanted)[0]


def gemm_rs_of(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> _OperandsAndProblem:
    """Returns the problem, with its x and weights."""
    problem, made, (xs, ws) = _reduction(case, ranks, libraries, "reduce_scatter")
    sets = len(xs)
    add_product(problem, made, "matmul_reduce_scatter", xs, ws, ranks.comm, wanted)

    def fused(group: str, i: int) -> Tensor:
        x, w = xs[i % sets], ws[i % sets].t()
        if not made.is_fp8:
            result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
        else:
            scale_x, scale_w = made.torch_scales(x, ws[i % sets])
            result = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, w, scale_x, scale_w, "sum", 0, 0, group, [x.shape[0], w.shape[1]], None, None,
                made.out_dtype, True,
            )  # fmt: skip
        return result

    add_torch_fused(problem, libraries, fused)
    return problem, made, (xs, ws)


def _gemm_ar(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> tuple[Problem, Any]:
    problem, made, (xs, ws) = _reduction(case, ranks, libraries, "all_reduce")
    sets = len(xs)
    add_product(problem, made, "matmul_all_reduce", xs, ws, ranks.comm, wanted)
    m, n, _ = case.local(ranks.size)

    def source(arena: Arena) -> tuple[Call, None]:
        sums = arena.empty((m, n), made.out_dtype)
        return (lambda i: made.multiply(xs[i % sets], ws[i % sets], sums)), None

    add_torch_all_reduces(problem, libraries, 2 * m * n, source)
    return problem, (xs, ws)


def gemm_ar(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    return _gemm_ar(case, ranks, libraries, wanted)[0]


def gemm_ar_norm(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """Returns the variants of gemm_ar, each followed by torch's residual addition and rms_norm ("apart": ours), and our
    single operator for all of it."""
    problem, (xs, ws) = _gemm_ar(case, ranks, libraries, ("auto",))
    made, comm, sets = Operands(case.dtype, ranks.device), ranks.comm, len(xs)
    m, n, _ = case.local(ranks.size)
    # Replicated: the same on all ranks.
    generator = torch.Generator().manual_seed(1)
    residual, gain = (torch.randn(s, generator=generator).to(ranks.device, made.out_dtype) for s in ((m, n), (n,)))

    def then_norm(call: Call, i: int) -> Tensor:
        return F.rms_norm(residual + call(i), (n,), gain, NORM_EPS)

    for variant in problem.variants:
        if variant.role in ("ours", "peer"):
            variant.call = partial(then_norm, variant.call)
        if variant.role == "ours":
            variant.name = "apart"

    def ours(i: int, algorithm: str) -> Tensor:
        return to.ops.matmul_all_reduce_rms_norm(
            xs[i % sets], ws[i % sets], residual, gain, comm, eps=NORM_EPS, algorithm=algorithm
        )[0]

    if not made.is_fp8:
        for name in wanted or ("auto",):
            problem.add(name, "ours", partial(call_named, ours, name))
    return problem


def gemm_alone(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """Returns the problem of cuBLASLt's best algorithm ("auto": the one of the operators), and each of our own
    kernels."""
    problem, made = Problem(case), Operands(case.dtype, ranks.device)
    (m, n, k), sets = case.shape, case.sets(ranks.size)
    xs = [made.random(m, k) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    out = made.empty(m, n)
    problem.add("gemm", "gemm", lambda i: made.multiply(xs[i % sets], ws[i % sets], out))
    problem.add("auto", "ours", lambda i: made.multiply(xs[i % sets], ws[i % sets], out), chosen="cublaslt")

    def own(i: int, kernel: str) -> Tensor:
        run_custom_gemm_kernel(made.arguments(xs[i % sets], ws[i % sets], out), kernel)
        return out

    kernels = custom_gemm_kernels(made.arguments(xs[0], ws[0], out))
    for kernel in kernels:
        problem.add(f"own {kernel}", "ours", partial(call_named, own, kernel))
    if not kernels:
        problem.missing["own"] = "no kernel of ours takes this product here"
    problem.add("torch.mm", "peer", lambda i: made.torch_mm(xs[i % sets], ws[i % sets], out))
    return problem
