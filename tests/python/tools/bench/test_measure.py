"""Conversion of samples to rows, and the check that a visit fits into the remaining time."""

from __future__ import annotations

import json
import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap.tools.bench import gemms
from torch_overlap.tools.bench.cases import MODES, Case, Visit, expected_seconds, in_order
from torch_overlap.tools.bench.cli import chosen_cases
from torch_overlap.tools.bench.collectives import last_algorithm
from torch_overlap.tools.bench.floor import Rates
from torch_overlap.tools.bench.measure import Outcome, summary
from torch_overlap.tools.bench.problem import Problem
from torch_overlap.tools.bench.report import block
from torch_overlap.tools.bench.run import FEW_ROUNDS, Options, Record, RoundBudget

ROOT = Path(__file__).resolve().parents[4]
H200 = Rates(link=386e9, memory=3.9e12)


def problem_of(case: Case) -> Problem:
    problem = Problem(case, missing={"absent": "not here"})
    for name, role in (("auto", "ours"), ("p2p", "ours"), ("quick", "peer"), ("slow", "peer")):
        problem.add(name, role, lambda i: torch.empty(0), chosen="p2p" if name == "auto" else "")  # type: ignore[arg-type]
    return problem


def test_rows_of_a_product() -> None:
    case = Case("gemm_rs", (8192, 8192, 8192), name="70b-o")
    problem = problem_of(case)
    problem.add("gemm", "gemm", lambda i: torch.empty(0))
    problem.add("reduce_scatter", "comm", lambda i: torch.empty(0))
    noise = [1.0, 1.1, 0.9, 1.2, 0.8]
    base = {"gemm": 400, "auto": 440, "p2p": 420, "quick": 430, "slow": 800, "reduce_scatter": 260}
    samples = {name: [us * x for x in noise] for name, us in base.items()}
    outcome = summary(Visit(case, "graph"), problem, samples, 4, H200)
    auto, p2p = outcome.rows
    assert (auto["algorithm"], auto["chosen"], auto["name"], auto["shape"]) == ("auto", "p2p", "70b-o", [8192] * 3)
    assert "chosen" not in p2p
    assert (auto["us"], auto["gemm_us"], auto["comm_us"]) == (440, 400, 260)
    # Noise is common to a round, so the ratio does not have it.
    assert (auto["ratio_gemm"], auto["ratio_iqr"]) == pytest.approx((1.1, 0))
    assert auto["iqr_us"] == pytest.approx(
        statistics.quantiles(samples["auto"])[2] - statistics.quantiles(samples["auto"])[0]
    )
    assert auto["noisy"] is True
    assert (p2p["best_peer"], p2p["ratio_peer"]) == ("quick", pytest.approx(420 / 430))
    assert p2p["peers"] == {"quick": 430, "slow": 800}
    assert 400 < p2p["floor_us"] < 410
    assert p2p["ratio_floor"] == pytest.approx(420 / p2p["floor_us"])
    assert p2p["gbps"] == pytest.approx(case.moved(4) / 420e-6 / 1e9)
    text = block(outcome)
    for part in ("gemm alone 400.0 us", "NOISY", "ours auto (p2p)", "1.100", "peer slow", "not run: absent: not here"):
        assert part in text


def test_rows_of_a_collective() -> None:
    case = Case("all_gather", (1 << 20,))
    samples = {"auto": [10.0] * 5, "p2p": [20.0] * 5, "quick": [8.0] * 5, "slow": [9.0] * 5}
    auto, _ = summary(Visit(case, "graph"), problem_of(case), samples, 4, H200).rows
    assert (auto["shape"], auto["name"], auto["us"]) == (1 << 20, "1 MiB", 10.0)
    assert not {"gemm_us", "ratio_gemm", "comm_us"} & set(auto)
    assert auto["ratio_peer"] == 1.25


def test_without_the_product_alone_there_is_no_ratio() -> None:
    case = Case("ag_gemm", (64, 64, 64))
    samples = {name: [5.0] * 4 for name in ("auto", "p2p", "quick", "slow")}
    rows = summary(Visit(case, "eager"), problem_of(case), samples, 2, H200).rows
    assert all("ratio_gemm" not in row and "floor_us" not in row for row in rows)


def test_a_pace_learns() -> None:
    visit = Visit(Case("ag_gemm", (8192, 10240, 8192)), "graph")
    expected = expected_seconds(visit, 2, 30)
    began = time.time()
    assert RoundBudget(Options("x", [], [], began=began), 2).rounds(visit) == 30
    budget = 1000 * expected  # the time of this test itself does not count
    pace = RoundBudget(Options("x", [], [], budget=budget, began=began), 2)
    assert pace.rounds(visit) == 30
    for _ in range(20):
        pace.record_duration(visit, 30, 1500 * expected)
    assert 8 <= pace.rounds(visit) < 30
    for _ in range(20):
        pace.record_duration(visit, 30, 15000 * expected)
    assert pace.rounds(visit) == 0
    assert RoundBudget(Options("x", [], [], budget=budget, began=began - budget), 2).rounds(visit) == 0


def test_rounds_are_fewer_where_more_fits_then() -> None:
    visits = in_order(chosen_cases(["all"], [], "bf16", None), MODES)
    at_most, at_least = (sum(expected_seconds(visit, 4, rounds) for visit in visits) for rounds in (30, 8))

    def rounds(budget: float) -> int:
        return RoundBudget(Options("x", [], [], budget=budget, began=time.time()), 4).rounds(visits[0], visits[1:])

    assert rounds(2 * at_most) == 30
    assert 8 < rounds((at_most + at_least) / 2) < 30
    assert rounds(at_least / 2) == 8


def test_all_of_bf16_fits_into_what_make_bench_has() -> None:
    """Runs on 4 GPUs in under four minutes, including eager calls, with fewer rounds."""
    (budget,) = re.findall(r"^BUDGET \?= (\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert int(budget) < 240
    visits = in_order(chosen_cases(["all"], [], "bf16", None), MODES)
    assert sum(expected_seconds(visit, 4, FEW_ROUNDS) for visit in visits) < int(budget)


def outcome_of(*algorithms: str, **missing: str) -> Outcome:
    visit = Visit(Case("ag_gemm", (64, 64, 64)), "graph")
    rows = [visit.row(2) | {"algorithm": name} for name in algorithms]
    return Outcome(visit, 2, rows=rows, missing=missing)


def test_what_a_visit_lacks() -> None:
    assert outcome_of("auto", p2p="no memory").lacks() == ""
    assert outcome_of("p2p", auto="wrong: differs").lacks() == "wrong: differs"
    assert outcome_of("p2p").lacks() == "no row of auto"
    assert outcome_of("p2p").lacks(["p2p"]) == ""
    assert outcome_of(all="no room").lacks() == "no room"
    assert outcome_of(ours="there is no such operator").lacks() == ""


def test_a_record_says_what_is_not_there_yet(tmp_path: Path) -> None:
    done, failed, later = (Visit(Case("ag_gemm", (64, 64, 64), name=name), "graph") for name in "abc")
    path = tmp_path / "result.json"
    record = Record(Options("x", [], [], json=path), H200, 2, [done, failed, later])
    record.add(Outcome(done, 2, rows=[done.row(2) | {"algorithm": "auto"}]))
    record.add(Outcome(failed, 2, missing={"all": "no room"}))
    left_out = json.loads(path.read_text())["left_out"]  # state of a run that is stopped here
    assert left_out == [later.row(2) | {"why": "the run was stopped"}, failed.row(2) | {"why": "no room"}]
    record.finish([later])
    assert json.loads(path.read_text())["left_out"][0]["why"] == "for want of time"


def test_the_way_that_a_collective_took(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr(to.flight_recorder, "dump_json", lambda: json.dumps({"entries": entries}))
    assert last_algorithm() == ""
    entries += [{"algorithm": "ll"}, {"algorithm": "simple"}]
    assert last_algorithm() == "simple"
    entries.append({"op": "all_reduce"})
    assert last_algorithm() == ""


def test_our_own_kernels_are_beside_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(gemms, "custom_gemm_kernels", lambda args: ["64x256", "128x128"])
    monkeypatch.setattr(gemms, "run_custom_gemm_kernel", lambda args, kernel: ran.append((kernel, args.out.shape)))
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), size=4)
    libraries: Any = None
    problem = gemms.gemm_alone(Case("gemm", (16, 32, 8)), ranks, libraries, ())
    own = [variant for variant in problem.variants if variant.name.startswith("own ")]
    assert [(variant.name, variant.role) for variant in own] == [("own 64x256", "ours"), ("own 128x128", "ours")]
    for variant in own:
        variant.call(3)
    assert ran == [("64x256", (16, 32)), ("128x128", (16, 32))]
