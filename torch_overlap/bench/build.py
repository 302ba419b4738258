"""From a case to its problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_overlap.bench.cases import COLLECTIVES, Case
from torch_overlap.bench.classes import ag_gemm_classes, bulk, gemm_rs_classes
from torch_overlap.bench.collectives import collective
from torch_overlap.bench.exchanges import exchange
from torch_overlap.bench.gemms import ag_gemm, gemm_alone, gemm_ar, gemm_ar_norm, gemm_rs
from torch_overlap.bench.libraries import NO_CUDA, Libraries
from torch_overlap.bench.problem import Problem
from torch_overlap.bench.ranks import Ranks

BUILDERS: dict[str, Callable[[Case, Ranks, Libraries, Sequence[str]], Problem]] = {
    "ag_gemm": ag_gemm,
    "gemm_rs": gemm_rs,
    "gemm_ar": gemm_ar,
    "gemm_ar_norm": gemm_ar_norm,
    "gemm": gemm_alone,
    "ag_gemm_classes": ag_gemm_classes,
    "gemm_rs_classes": gemm_rs_classes,
    "bulk_ag": bulk,
    "bulk_rs": bulk,
    "a2a_gemm": exchange,
    "gemm_a2a": exchange,
    **dict.fromkeys(COLLECTIVES, collective),
}


def build(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str] = ()) -> Problem:
    """Makes the inputs of a case and its variants. `wanted` names algorithms of ours; none: all that can run."""
    libraries.reset()
    problem = BUILDERS[case.op](case, ranks, libraries, wanted)
    problem.missing = {name: why or NO_CUDA for name, why in problem.missing.items()}
    return problem
