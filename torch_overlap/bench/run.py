"""A run on all ranks: visits in order, until the time is over; the result on rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_overlap.bench import report, result
from torch_overlap.bench.build import build
from torch_overlap.bench.cases import Case, expected_seconds, in_order
from torch_overlap.bench.floor import Rates
from torch_overlap.bench.libraries import Libraries
from torch_overlap.bench.measure import Outcome, measure
from torch_overlap.bench.ranks import ENVIRONMENT, Ranks
from torch_overlap.bench.rates import measure_rates
from torch_overlap.gemm import set_gemm_tuning


@dataclass
class Options:
    """What was asked for. began: seconds since the epoch, when the command was given."""

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
    tp = ranks.size
    for case in options.cases:
        case.check(tp)
    set_gemm_tuning("measured")
    rates = measure_rates(ranks)
    libraries = Libraries.open(ranks, options.cases)
    ranks.say(report.header(options.name, tp, rates))
    modes = [mode for mode in options.modes if mode == "eager" or ranks.device.type == "cuda"]
    if len(modes) < len(options.modes):
        ranks.say("not run: graph: needs CUDA")
    outcomes: list[Outcome] = []
    left_out = []
    pace = 1.0  # measured over expected seconds, so far
    for visit in in_order(options.cases, modes):
        expected = expected_seconds(visit, tp, options.rounds)
        elapsed = time.time() - options.began
        fits = options.budget is None or elapsed + expected * pace <= options.budget
        if not ranks.first_says(fits):
            left_out.append(visit)
            continue
        start = time.time()
        outcome = measure(
            visit, lambda case=visit.case: build(case, ranks, libraries, options.algorithms),  # type: ignore[misc]
            ranks, rates, options.rounds,
        )  # fmt: skip
        pace = 0.7 * pace + 0.3 * (time.time() - start) / expected
        outcomes.append(outcome)
        ranks.say(report.block(outcome))
    if left_out:
        ranks.say(report.left_out_text(left_out, options.budget))
    if ranks.rank == 0:
        content = _content(options, outcomes, rates, [str(visit) for visit in left_out])
        for path in _written(options, content, tp):
            ranks.say(f"\nwrote {path}")
    ranks.say(f"{time.time() - options.began:.0f} s in all")
    libraries.close()
    ranks.stop()


def _content(options: Options, outcomes: Sequence[Outcome], rates: Rates, left_out: list[str]) -> dict[str, Any]:
    missing = {str(outcome.visit): outcome.missing for outcome in outcomes if outcome.missing}
    more: dict[str, Any] = {
        "rates": {"link_gbps": rates.link / 1e9, "memory_gbps": rates.memory / 1e9},
        "rounds": options.rounds,
        "gpu_state": result.gpu_state(),
        "environment": {name: os.environ.get(name, "") for name in ENVIRONMENT},
        "left_out": left_out,
        "missing": missing,
    }
    return result.result(options.name, [row for outcome in outcomes for row in outcome.rows], **more)


def _written(options: Options, content: dict[str, Any], tp: int) -> list[Path]:
    paths = []
    if options.json is not None:
        import json

        options.json.write_text(json.dumps(content, indent=1) + "\n")
        paths.append(options.json)
    if options.out is not None:
        paths.append(result.write(content, tp, options.out))
    return paths
