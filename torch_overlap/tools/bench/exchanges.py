"""Products with an all-to-all, as around attention with sharded heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_overlap.tools.bench.cases import Case
from torch_overlap.tools.bench.libraries import Libraries, Library
from torch_overlap.tools.bench.problem import Call, Operands, Problem, add_libraries, add_ours
from torch_overlap.tools.bench.ranks import Ranks


def exchange(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """Returns a problem. a2a_gemm: x [M, K / tp] becomes [M / tp, K] and is multiplied. gemm_a2a: the product of x [M /
    tp, K] becomes [M, N / tp]. w is [N, K] on every rank."""
    problem, made, comm, tp = Problem(case), Operands(case.dtype, ranks.device), ranks.comm, ranks.size
    (m, n, k), sets, is_before_gemm = case.local(tp), case.sets(tp), case.op == "a2a_gemm"
    if made.is_fp8:
        raise ValueError(f"bench: expected --dtype bf16 or fp16 of {case.op}, got {case.dtype}")
    x_shape = (m * tp, k // tp) if is_before_gemm else (m, k)
    xs = [made.random(*x_shape) for _ in range(sets)]
    ws = [made.random(n, k) for _ in range(sets)]
    rows, out = made.random(m, k), made.empty(m, n)
    problem.add("gemm", "gemm", lambda i: made.multiply(rows, ws[i % sets], out))

    op = "all_to_all_matmul" if is_before_gemm else "matmul_all_to_all"
    inputs = [(x, w if is_before_gemm else [w], comm) for x, w in zip(xs, ws, strict=True)]
    add_ours(problem, op, inputs, wanted, None if is_before_gemm else lambda results: results[0])

    def calls(library: Library) -> tuple[Call, Call, None]:
        sent = (
            [library.like(x) for x in xs]
            if is_before_gemm
            else [library.empty((m * tp, n // tp), made.dtype).normal_()]
        )
        received = library.empty(sent[0].shape, made.dtype)

        def alone(i: int) -> Tensor:
            library.all_to_all(received, sent[i % len(sent)])
            return received

        def sequential(i: int) -> Tensor:
            if is_before_gemm:
                heads = alone(i).view(tp, m, -1).movedim(0, 1).reshape(m, k)
                return made.multiply(heads, ws[i % sets], out)
            product = made.multiply(xs[i % sets], ws[i % sets], out)
            sent[0].view(tp, m, -1).copy_(product.view(m, tp, -1).movedim(1, 0))
            return alone(i)

        return alone, sequential, None

    add_libraries(problem, libraries, "all_to_all", calls)
    return problem
