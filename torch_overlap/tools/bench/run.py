"""A run on all ranks: visits in order, until the time budget is spent. Rank 0 has the result."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch_overlap.gemm import set_gemm_tuning
from torch_overlap.tools.bench import report, result
from torch_overlap.tools.bench.build import build
from torch_overlap.tools.bench.cases import Case, Visit, expected_seconds, in_order
from torch_overlap.tools.bench.floor import Rates
from torch_overlap.tools.bench.libraries import Libraries
from torch_overlap.tools.bench.measure import Outcome, measure
from torch_overlap.tools.bench.ranks import ENVIRONMENT, Ranks
from torch_overlap.tools.bench.rates import measure_rates

FEW_ROUNDS = 8


@dataclass
class Options:
    """The options of a run.

    rounds: the maximum; fewer if that fits more into `budget`.
    began: start time of the command, in seconds since the epoch; `budget` counts from there.
    json, out: the file, and the folder, for the result.
    """

    name: str
    cases: Sequence[Case]
    modes: Sequence[str]
    algorithms: Sequence[str] = ()
    rounds: int = 30
    budget: float | None = None
    device: str = "cuda"
    json: Path | None = None
    out: Path | None = None
    timeline: bool = False
    began: float = field(default_factory=time.time)


def run(options: Options) -> bool:
    """Runs the visits. Collective; rank 0 prints and writes. Returns True if an operator or collective of ours was
    measured."""
    ranks = Ranks.start(options.device)
    for case in options.cases:
        case.check(ranks.size)
    set_gemm_tuning("measured")
    rates = measure_rates(ranks)
    libraries = Libraries.open(ranks, options.cases)
    ranks.say(report.header(options.name, ranks.size, rates))
    modes = [mode for mode in options.modes if mode == "eager" or ranks.device.type == "cuda"]
    if len(modes) < len(options.modes):
        ranks.say("not run: graph: needs CUDA")
    visits = in_order(options.cases, modes)
    record = Record(options, rates, ranks.size, visits) if ranks.rank == 0 else None
    pace = RoundBudget(options, ranks.size)
    left_out = []
    num_rows = 0
    drawn: set[str] = set()
    for index, visit in enumerate(visits):
        rounds = ranks.broadcast_value(pace.rounds(visit, visits[index + 1 :]))
        if rounds == 0:
            left_out.append(visit)
            continue
        case = visit.case
        with_timeline = options.timeline and case.is_gemm and case.op not in drawn
        drawn.add(case.op)
        start = time.time()
        build_problem = partial(build, case, ranks, libraries, options.algorithms)
        outcome = measure(visit, build_problem, ranks, rates, rounds, with_timeline)
        pace.record_duration(visit, rounds, time.time() - start)
        ranks.say(report.block(outcome))
        num_rows += len(outcome.rows)
        if record is not None:
            record.add(outcome)
    if left_out and options.budget is not None:
        ranks.say(report.left_out_text(left_out, options.budget))
    if record is not None:
        for path in record.finish(left_out):
            ranks.say(f"\nwrote {path}")
    ranks.say(f"{time.time() - options.began:.0f} s in all")
    num_rows = int(ranks.broadcast_value(num_rows))
    if num_rows == 0:
        ranks.say(report.nothing_measured_text(len(left_out), len(visits)))
    ranks.try_on_all_ranks(libraries.close)
    ranks.stop()
    return num_rows > 0


class RoundBudget:
    """Number of rounds of a visit that fit into the rest of the budget, estimated from the previous visits."""

    def __init__(self, options: Options, tp: int) -> None:
        self._options = options
        self._tp = tp
        self._slowness = 1.0

    def _expected(self, visits: Sequence[Visit], rounds: int) -> float:
        return self._slowness * sum(expected_seconds(visit, self._tp, rounds) for visit in visits)

    def rounds(self, visit: Visit, later: Sequence[Visit] = ()) -> int:
        """Returns the rounds that leave time for later visits, but at least FEW_ROUNDS; 0 if not even those fit."""
        most = self._options.rounds
        if self._options.budget is None:
            return most
        seconds = self._options.budget - (time.time() - self._options.began)
        none = self._expected([visit, *later], 0)
        each = (self._expected([visit, *later], most) - none) / most
        fit = max(min(most, FEW_ROUNDS), min(most, int((seconds - none) / each)))
        return fit if self._expected([visit], fit) <= seconds else 0

    def record_duration(self, visit: Visit, rounds: int, seconds: float) -> None:
        self._slowness = 0.7 * self._slowness + 0.3 * seconds / expected_seconds(visit, self._tp, rounds)


class Record:
    """The result so far, written after each visit. An interrupted run keeps its rows, and lists the missing ones."""

    def __init__(self, options: Options, rates: Rates, tp: int, visits: Sequence[Visit]) -> None:
        self._options = options
        self._tp = tp
        self._left_out = dict.fromkeys(visits, "the run was stopped")
        self._missing: dict[str, dict[str, str]] = {}
        self._rows: list[dict[str, Any]] = []
        self._timelines: list[dict[str, Any]] = []
        more: dict[str, Any] = {
            "rates": {"link_gbps": rates.link / 1e9, "memory_gbps": rates.memory / 1e9},
            "rounds": options.rounds,
            "gpu_state": result.gpu_state(),
            "environment": {name: os.environ.get(name, "") for name in ENVIRONMENT},
            "left_out": [],  # requested cases without a row, and the reason
            "missing": self._missing,
            "timelines": self._timelines,
        }
        self._content = result.result(options.name, self._rows, **more)

    def add(self, outcome: Outcome) -> None:
        self._rows += outcome.rows
        self._timelines += outcome.timelines
        if outcome.missing:
            self._missing[str(outcome.visit)] = outcome.missing
        del self._left_out[outcome.visit]
        if why := outcome.lacks(self._options.algorithms):
            self._left_out[outcome.visit] = why
        self._write()

    def finish(self, left_out: Sequence[Visit]) -> list[Path]:
        self._left_out |= dict.fromkeys(left_out, "for want of time")
        return self._write()

    def _write(self) -> list[Path]:
        self._content["left_out"] = [visit.row(self._tp) | {"why": why} for visit, why in self._left_out.items()]
        paths = []
        if self._options.json is not None:
            self._options.json.write_text(result.text(self._content))
            paths.append(self._options.json)
        if self._options.out is not None:
            paths.append(result.write(self._content, self._tp, self._options.out))
        return paths
