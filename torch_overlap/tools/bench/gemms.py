"""Products with their communication: ours, and a library's collective before or after the product."""

from __future__ import annotations

from collections.abc import Sequence
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
    add_ours,
    add_torch_all_reduces,
    call_named,
    libraries_with,
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

    def ours(i: int, algorithm: str) -> Tensor:
        x, w = xs[i % sets], ws[i % sets]
        if not made.is_fp8:
            products: list[Tensor] = to.ops.all_gather_matmul(x, [w], comm, algorithm=algorithm)[0]
            return products[0]
        scales = made.scale(x), [made.scale(w)]
        products, _, _ = to.ops.scaled_all_gather_matmul(
            x, scales[0], [w], scales[1], comm, algorithm=algorithm, scaling_mode=made.mode
        )
        return products[0]

    if made.is_fp8:
        scaled = (xs[0], made.scale(xs[0]), [ws[0]], [made.scale(ws[0])], comm)
        add_ours(problem, "scaled_all_gather_matmul", scaled, wanted, ours, scaling_mode=made.mode)
    else:
        add_ours(problem, "all_gather_matmul", (xs[0], [ws[0]], comm), wanted, ours)

    for library in libraries_with(problem, libraries, "all_gather"):
        own, gathered = [library.like(x) for x in xs], library.empty((m, k), made.dtype)

        def alone(i: int, own: list[Tensor] = own, gathered: Tensor = gathered, at: Library = library) -> Tensor:
            at.all_gather(gathered, own[i % sets])
            return gathered

        def sequential(i: int, alone: Call = alone) -> Tensor:
            return made.multiply(alone(i), ws[i % sets], out)

        if library is libraries.plain:
            problem.add("all_gather", "comm", alone)
        problem.add(library.name, "peer", sequential)

    if libraries.torch_symmetric is None:
        problem.missing["torch fused"] = libraries.missing_reason("torch")
        return problem, made, (xs, ws)
    group = libraries.torch_symmetric.group_name

    def fused(i: int) -> Tensor:
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

    problem.add("torch fused", "peer", fused)
    return problem, made, (xs, ws)


def _reduction(case: Case, ranks: Ranks, libraries: Libraries, collective: str) -> _OperandsAndProblem:
    """Returns the common part of gemm_rs and gemm_ar: the product, followed by the collective of every library."""
    problem, made, tp = Problem(case), Operands(case.dtype, ranks.device), ranks.size
    (m, n, k), sets = case.local(tp), case.sets(tp)
    xs = [made.random(m, k) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    whole = made.empty(m, n)
    problem.add("gemm", "gemm", lambda i: made.multiply(xs[i % sets], ws[i % sets], whole))
    for library in libraries_with(problem, libraries, collective):
        partial_sums = library.empty((m, n), made.out_dtype)
        part = library.empty((m // tp, n), made.out_dtype) if collective == "reduce_scatter" else partial_sums
        made.multiply(xs[0], ws[0], partial_sums)

        def alone(i: int, source: Tensor = partial_sums, part: Tensor = part, at: Library = library) -> Tensor:
            if collective == "reduce_scatter":
                at.reduce_scatter(part, source)
            else:
                at.all_reduce(source)
            return part

        def sequential(i: int, source: Tensor = partial_sums, alone: Call = alone) -> Tensor:
            made.multiply(xs[i % sets], ws[i % sets], source)
            return alone(i)

        if library is libraries.plain:
            again = partial(made.multiply, xs[0], ws[0], partial_sums) if collective == "all_reduce" else None
            problem.add(collective, "comm", alone, again)
        problem.add(library.name, "peer", sequential)
    return problem, made, (xs, ws)


def gemm_rs(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    return gemm_rs_of(case, ranks, libraries, wanted)[0]


def gemm_rs_of(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> _OperandsAndProblem:
    """Returns the problem, with its x and weights."""
    problem, made, (xs, ws) = _reduction(case, ranks, libraries, "reduce_scatter")
    comm, sets = ranks.comm, len(xs)

    def ours(i: int, algorithm: str) -> Tensor:
        x, w = xs[i % sets], ws[i % sets]
        if not made.is_fp8:
            return to.ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm)
        return to.ops.scaled_matmul_reduce_scatter(
            x, made.scale(x), w, made.scale(w), comm, algorithm=algorithm, scaling_mode=made.mode
        )

    if made.is_fp8:
        scaled = (xs[0], made.scale(xs[0]), ws[0], made.scale(ws[0]), comm)
        add_ours(problem, "scaled_matmul_reduce_scatter", scaled, wanted, ours, scaling_mode=made.mode)
    else:
        add_ours(problem, "matmul_reduce_scatter", (xs[0], ws[0], comm), wanted, ours)
    if libraries.torch_symmetric is None:
        problem.missing["torch fused"] = libraries.missing_reason("torch")
        return problem, made, (xs, ws)
    group = libraries.torch_symmetric.group_name

    def fused(i: int) -> Tensor:
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

    problem.add("torch fused", "peer", fused)
    return problem, made, (xs, ws)


def _gemm_ar(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> tuple[Problem, Any]:
    problem, made, (xs, ws) = _reduction(case, ranks, libraries, "all_reduce")
    comm, sets = ranks.comm, len(xs)
    if made.is_fp8:
        scaled = (xs[0], made.scale(xs[0]), ws[0], made.scale(ws[0]), comm)

        def ours(i: int, algorithm: str) -> Tensor:
            x, w = xs[i % sets], ws[i % sets]
            return to.ops.scaled_matmul_all_reduce(
                x, made.scale(x), w, made.scale(w), comm, algorithm=algorithm, scaling_mode=made.mode
            )

        add_ours(problem, "scaled_matmul_all_reduce", scaled, wanted, ours, scaling_mode=made.mode)
    else:
        add_ours(
            problem, "matmul_all_reduce", (xs[0], ws[0], comm), wanted,
            lambda i, algorithm: to.ops.matmul_all_reduce(xs[i % sets], ws[i % sets], comm, algorithm=algorithm),
        )  # fmt: skip
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
