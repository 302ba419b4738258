"""Measures one visit: a case in one mode, from its variants to the rows of a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_overlap._timing import Samples, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench.cases import Visit
from torch_overlap.tools.bench.floor import Rates, floor_us
from torch_overlap.tools.bench.problem import Problem, Variant
from torch_overlap.tools.bench.ranks import Ranks
from torch_overlap.tools.bench.trace import timelines

# Results of one problem differ by the order of their sums, and by the rounding of partial sums.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp8": 2e-2, "fp8_rows": 2e-2}
NOISY = 0.03


@dataclass
class Outcome:
    """The result of a visit: our rows, and further data for the report."""

    visit: Visit
    tp: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)  # product and collective without each other, by name, in us
    peers: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    timelines: list[dict[str, Any]] = field(default_factory=list)

    def lacks(self, wanted: Sequence[str] = ()) -> str:
        """Returns the reason why the row of "auto", or of the requested algorithm, is missing; empty if it exists or
        cannot exist."""
        name = "auto" if not wanted or "auto" in wanted else wanted[0]
        if "ours" in self.missing or any(row["algorithm"] == name for row in self.rows):
            return ""
        return self.missing.get(name) or self.missing.get("all") or f"no row of {name}"


def validate_variants(problem: Problem, ranks: Ranks) -> None:
    """Runs every variant once. Those that fail, or differ from the result of the first peer, become missing.
    Collective."""
    results: dict[str, Tensor] = {}
    kept: list[Variant] = []
    for variant in problem.variants:

        def once(variant: Variant = variant) -> None:
            if variant.before is not None:
                variant.before()
            made = variant.call(0)
            if variant.tell is not None:
                variant.chosen = variant.tell()
            results[variant.name] = made.clone()
            # NaN, so that a variant cannot pass with this result left in memory.
            made.view(torch.uint8).fill_(255)

        reason = ranks.try_on_all_ranks(once)
        if reason:
            problem.missing[variant.name] = reason
        else:
            kept.append(variant)
    compared = [variant for variant in kept if variant.role in ("ours", "peer")]
    reference = next((variant for variant in compared if variant.role == "peer"), None)
    if reference is not None:
        errors = [relative_error(results[variant.name], results[reference.name]) for variant in compared]
        worst = [max(column) for column in zip(*ranks.all_gather_objects(errors), strict=True)]
        for variant, error in zip(compared, worst, strict=True):
            if error > TOLERANCE[problem.case.dtype]:
                problem.missing[variant.name] = f"wrong: differs from {reference.name} by {error:.1e}"
                kept.remove(variant)
    problem.variants = kept


def relative_error(mine: Tensor, reference: Tensor) -> float:
    """Returns the norm of the difference over that of the reference; infinite if it is NaN."""
    a, b = mine.double(), reference.double()
    found = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return math.inf if math.isnan(found) else found


def sample_all(problem: Problem, ranks: Ranks, mode: str, rounds: int) -> Samples:
    """Returns samples of all variants, of the slowest rank. In the mode "graph" those that cannot be captured become
    missing."""
    calls = problem.case.calls(ranks.size)
    repeats = problem.case.repeats(ranks.size, mode) if ranks.device.type == "cuda" else 1  # a CPU has no queue
    samplers: dict[str, Callable[[], float]] = {}
    kept = []
    for variant in problem.variants:
        if mode == "eager":
            variant.update_chosen()
            steps = partial(_steps, variant, calls)
            samplers[variant.name] = ranks.eager.sampler(steps, calls, repeats, variant.before)
        else:
            graph = _Captured(variant, calls, TOLERANCE[problem.case.dtype])
            # One run outside the capture, so that memory and plans of all inputs exist.
            reason = (
                ranks.try_on_all_ranks(graph.do)
                or ranks.try_on_all_ranks(graph.capture)
                or ranks.try_on_all_ranks(graph.check)
            )
            if reason:
                problem.missing[variant.name] = f"in a graph: {reason}"
                continue
            samplers[variant.name] = ranks.captured.sampler(graph.replay, calls, before=variant.before)
        kept.append(variant)
    problem.variants = kept
    return slowest_rank(interleave(samplers, rounds), ranks.comm)


class _Captured:
    """The calls of a variant in a graph, whose last result must equal that of the same calls outside of it."""

    def __init__(self, variant: Variant, calls: int, tolerance: float) -> None:
        self._variant = variant
        self._calls = calls
        self._tolerance = tolerance
        self._results: list[Tensor] = []  # the expected result, and that of the graph

    def _prepare(self) -> None:
        if self._variant.before is not None:
            self._variant.before()

    def do(self) -> None:
        self._prepare()
        self._results.append(_steps(self._variant, self._calls).clone())

    def capture(self) -> None:
        def calls() -> None:
            self._variant.update_chosen()
            self._results.append(_steps(self._variant, self._calls))

        self.replay = in_graph(calls)

    def check(self) -> None:
        expected, made = self._results
        self._results.clear()
        made.view(torch.uint8).fill_(255)  # NaN
        self._prepare()
        self.replay()
        error = relative_error(made, expected)
        # Repeated sums in place may overflow their type.
        if error > self._tolerance and expected.double().isfinite().all():
            raise RuntimeError(f"wrong: differs from a call outside by {error:.1e}")


def _steps(variant: Variant, calls: int) -> Tensor:
    """Makes the calls and returns the result of the last one."""
    for i in range(calls):
        made = variant.call(i)
    return made


def measure(visit: Visit, build: Callable[[], Problem], ranks: Ranks, rates: Rates, rounds: int,
            with_timeline: bool = False) -> Outcome:  # fmt: skip
    """Measures a visit. Collective."""
    built: list[Problem] = []
    if reason := ranks.try_on_all_ranks(lambda: built.append(build())):
        return Outcome(visit, ranks.size, missing={"all": reason})
    problem = built.pop()
    validate_variants(problem, ranks)
    samples = sample_all(problem, ranks, visit.mode, rounds)
    spans = timelines(problem, ranks) if with_timeline else []
    outcome = summary(visit, problem, samples, ranks.size, rates)
    outcome.timelines = spans
    cleanups = problem.cleanups
    problem.variants.clear()
    del problem, samples
    for end in cleanups:
        end()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return outcome


def summary(visit: Visit, problem: Problem, samples: Samples, tp: int, rates: Rates) -> Outcome:
    """Returns the rows of the samples, from the case, the variants' names and roles, and the times."""
    case = visit.case
    named = {role: [v.name for v in problem.variants if v.role == role] for role in ("gemm", "comm", "ours", "peer")}
    outcome = Outcome(visit, tp, missing=dict(problem.missing))
    outcome.others = {name: spread_of(samples[name]).median for name in named["gemm"] + named["comm"]}
    gemm = spread_of(samples["gemm"]) if named["gemm"] else None
    peers = {name: spread_of(samples[name]).median for name in named["peer"]}
    outcome.peers = peers
    best = min(peers, key=lambda name: peers[name], default=None)
    least = floor_us(case, tp, gemm.median if gemm else None, rates) if gemm or not case.is_gemm else None
    for variant in (v for v in problem.variants if v.role == "ours"):
        spread = spread_of(samples[variant.name])
        row: dict[str, Any] = visit.row(tp) | {"algorithm": variant.name, "us": spread.median, "iqr_us": spread.iqr}
        row["rounds"] = len(samples[variant.name])
        if variant.chosen:
            row["chosen"] = variant.chosen
        if gemm is not None:
            over = ratio_of(samples, variant.name, "gemm")
            row |= {"gemm_us": gemm.median, "gemm_iqr_us": gemm.iqr, "ratio_gemm": over.median, "ratio_iqr": over.iqr}
            row["noisy"] = gemm.iqr > NOISY * gemm.median
        if named["comm"]:
            row["comm_us"] = outcome.others[named["comm"][0]]
        if least is not None:
            row |= {"floor_us": least, "ratio_floor": spread.median / least}
        row["gbps"] = case.moved(tp) / spread.median / 1e3
        if best is not None:
            beside = ratio_of(samples, variant.name, best)
            row |= {"best_peer": best, "ratio_peer": beside.median, "ratio_peer_iqr": beside.iqr}
        outcome.rows.append(row | {"peers": peers})
    return outcome
