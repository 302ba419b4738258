"""A run on all ranks: visits in order, until the time is over; the result on rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch_overlap.bench import report, result
from torch_overlap.bench.build import build
from torch_overlap.bench.cases import Case, Visit, expected_seconds, in_order
from torch_overlap.bench.floor import Rates
from torch_overlap.bench.libraries import Libraries
from torch_overlap.bench.measure import Outcome, measure
from torch_overlap.bench.ranks import ENVIRONMENT, Ranks
from torch_overlap.bench.rates import measure_rates
from torch_overlap.gemm import set_gemm_tuning


@dataclass
class Options:
    """What was asked for.

    began: when the command was given, in seconds since the epoch; `budget` counts from there.
    json, out: the file, and the folder, that the result goes into.
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


def run(options: Options) -> None:
    """Collective; prints and writes on rank 0."""
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
    record = Record(options, rates, ranks.size) if ranks.rank == 0 else None
    pace = Pace(options, ranks.size)
    left_out = []
    drawn: set[str] = set()
    for visit in in_order(options.cases, modes):
        if not ranks.first_says(pace.fits(visit)):
            left_out.append(visit)
            continue
        case = visit.case
        with_timeline = options.timeline and case.is_gemm and case.op not in drawn
        drawn.add(case.op)
        start = time.time()
        making = partial(build, case, ranks, libraries, options.algorithms)
        outcome = measure(visit, making, ranks, rates, options.rounds, with_timeline)
        pace.took(visit, time.time() - start)
        ranks.say(report.block(outcome))
        if record is not None:
            record.add(outcome)
    if left_out and options.budget is not None:
        ranks.say(report.left_out_text(left_out, options.budget))
    if record is not None:
        for path in record.finish(left_out):
            ranks.say(f"\nwrote {path}")
    ranks.say(f"{time.time() - options.began:.0f} s in all")
    ranks.attempt(libraries.close)
    ranks.stop()


class Pace:
    """Whether a visit fits into what is left of the budget, as far as the ones before tell."""

    def __init__(self, options: Options, tp: int) -> None:
        self._options = options
        self._tp = tp
        self._slowness = 1.0

    def _expected(self, visit: Visit) -> float:
        return expected_seconds(visit, self._tp, self._options.rounds)

    def fits(self, visit: Visit) -> bool:
        if self._options.budget is None:
            return True
        elapsed = time.time() - self._options.began
        return elapsed + self._expected(visit) * self._slowness <= self._options.budget

    def took(self, visit: Visit, seconds: float) -> None:
        self._slowness = 0.7 * self._slowness + 0.3 * seconds / self._expected(visit)


class Record:
    """The result so far, written after each visit: a run that is stopped keeps what it has."""

    def __init__(self, options: Options, rates: Rates, tp: int) -> None:
        self._options = options
        self._tp = tp
        self._missing: dict[str, dict[str, str]] = {}
        self._rows: list[dict[str, Any]] = []
        self._timelines: list[dict[str, Any]] = []
        more: dict[str, Any] = {
            "rates": {"link_gbps": rates.link / 1e9, "memory_gbps": rates.memory / 1e9},
            "rounds": options.rounds,
            "gpu_state": result.gpu_state(),
            "environment": {name: os.environ.get(name, "") for name in ENVIRONMENT},
            "left_out": [],
            "missing": self._missing,
            "timelines": self._timelines,
        }
        self._content = result.result(options.name, self._rows, **more)

    def add(self, outcome: Outcome) -> None:
        self._rows += outcome.rows
        self._timelines += outcome.timelines
        if outcome.missing:
            self._missing[str(outcome.visit)] = outcome.missing
        self._write()

    def finish(self, left_out: Sequence[Visit]) -> list[Path]:
        self._content["left_out"] = [str(visit) for visit in left_out]
        return self._write()

    def _write(self) -> list[Path]:
        paths = []
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._content, indent=1) + "\n")
            paths.append(self._options.json)
        if self._options.out is not None:
            paths.append(result.write(self._content, self._tp, self._options.out))
        return paths
