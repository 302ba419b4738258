"""Builds the problem of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_overlap import _C
from torch_overlap.tools.bench.cases import COLLECTIVES, Case
from torch_overlap.tools.bench.classes import CLASS_NAMES, ag_gemm_classes, bulk, gemm_rs_classes
from torch_overlap.tools.bench.collectives import ALGORITHMS, REGISTERED, collective
from torch_overlap.tools.bench.exchanges import exchange
from torch_overlap.tools.bench.gemms import ag_gemm, gemm_alone, gemm_ar, gemm_ar_norm, gemm_rs
from torch_overlap.tools.bench.libraries import NO_CUDA, Libraries
from torch_overlap.tools.bench.problem import Problem
from torch_overlap.tools.bench.ranks import Ranks

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


def algorithm_names(op: str) -> tuple[str, ...]:
    """Returns the names that --algorithm may have for an operation, on this machine or another."""
    if op in COLLECTIVES:
        return (*ALGORITHMS, *(way + REGISTERED for way in ALGORITHMS))
    return ("auto", *_C._algorithms(), *CLASS_NAMES.get(op, ()))


def check_algorithms(wanted: Sequence[str], ops: Sequence[str]) -> None:
    """Raises ValueError for a name that none of the operations knows."""
    known = list(dict.fromkeys(name for op in ops for name in algorithm_names(op)))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"bench: expected --algorithm of {', '.join(known)}, got {', '.join(unknown)}")


def build(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str] = ()) -> Problem:
    """Makes the inputs of a case and its variants. `wanted` names our algorithms; empty means all that can run."""
    libraries.reset()
    problem = BUILDERS[case.op](case, ranks, libraries, wanted)
    problem.missing = {name: why or NO_CUDA for name, why in problem.missing.items()}
    return problem
