"""Goals, and the cases that miss them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_overlap.tools.bench.cases import EXCHANGE_OPS, KNOWN_OPS, MODES, OPS, cases_of

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))
import check_goals  # noqa: E402


def row(op: str = "ag_gemm", shape: Any = (64, 64, 64), mode: str = "graph", **more: Any) -> dict[str, Any]:
    known = {"op": op, "shape": list(shape) if isinstance(shape, tuple) else shape, "dtype": "bf16", "tp": 2,
             "mode": mode, "algorithm": "auto", "us": 10.0, "iqr_us": 0.1, "gemm_us": 9.0, "ratio_gemm": 1.1,
             "ratio_floor": 1.05, "ratio_peer": 0.9, "peers": {"nccl": 20.0}}  # fmt: skip
    return known | more


def kept(goal: dict[str, Any], *rows: dict[str, Any]) -> list[bool]:
    findings, _ = check_goals.compare([goal], rows)
    return [finding.kept for finding in findings]


def test_bounds() -> None:
    assert kept({"at_most": {"ratio_gemm": 1.1}}, row()) == [True]
    assert kept({"at_most": {"ratio_gemm": 1.09}}, row()) == [False]
    # One of several bounds is enough.
    assert kept({"at_most": {"ratio_gemm": 1.0, "ratio_floor": 1.05}}, row()) == [True]
    assert kept({"at_most": {"over_nccl": 0.5}}, row()) == [True]
    assert kept({"at_most": {"over_nccl": 0.4}}, row()) == [False]
    assert kept({"at_most": {"over_graph": 1.05}, "mode": "eager"}, row(), row(mode="eager", us=10.4)) == [True]
    assert kept({"at_most": {"over_graph": 1.05}, "mode": "eager"}, row(), row(mode="eager", us=10.6)) == [False]
    # Rounds in which the product itself took longer are kept too.
    slow = {"mode": "eager", "at_most": {"over_graph": 1.05}}
    assert kept(slow, row(us=1000, gemm_us=900), row(mode="eager", us=1060, gemm_us=945)) == [True]
    assert kept(slow, row(us=1000, gemm_us=900), row(mode="eager", us=1060, gemm_us=900)) == [False]
    # Except for a short case, in which the difference would be the host's time.
    assert kept(slow, row(), row(mode="eager", us=10.6, gemm_us=9.45)) == [False]


def test_auto_against_the_best_of_ours() -> None:
    goal = {"at_most": {"over_best_of_ours": 1.02}}
    p2p = row(algorithm="p2p", us=9.0)
    assert kept(goal, row(us=9.18), p2p, row(algorithm="fused", us=11.0)) == [True]
    assert kept(goal, row(us=9.3), p2p) == [False]
    # Within the spread of either. Other cases do not count, nor does one that overlaps nothing in a forward pass.
    assert kept(goal, row(us=9.3, iqr_us=0.31), p2p) == [True]
    assert kept(goal, row(us=9.3), p2p | {"iqr_us": 0.31}) == [True]
    assert kept(goal, row(us=9.3), p2p | {"mode": "eager"}, row(algorithm="bulk", us=1.0)) == []


def test_the_floor_counts_where_communication_takes_longer_than_the_product() -> None:
    goal = {"at_most": {"ratio_gemm": 1.0, "floor_where_communication_bound": 1.05}}
    assert kept(goal, row(comm_us=9.0)) == [True]
    assert kept(goal, row(comm_us=9.0, ratio_floor=1.06)) == [False]
    assert kept(goal, row(comm_us=8.9)) == [False]
    assert kept(goal, row(comm_us=8.9, ratio_gemm=1.0)) == [True]


def test_which_rows_a_goal_is_about() -> None:
    rows = [
        row(),
        row(algorithm="p2p", ratio_gemm=9.0),
        row(tp=4),
        row(op="all_reduce", shape=1024),
        row(mode="eager"),
    ]
    bound = {"at_most": {"ratio_gemm": 2.0}}
    assert len(kept(bound, *rows)) == 4
    assert kept({**bound, "algorithm": "p2p"}, *rows) == [False]
    assert len(kept({**bound, "tp": [2, 8]}, *rows)) == 3
    assert len(kept({**bound, "op": "ag_gemm", "shape": [64, 64, 64], "mode": "graph"}, *rows)) == 2
    assert len(kept({**bound, "shape": [[64, 64, 64], [1, 2, 3]]}, *rows)) == 3
    assert len(kept({**bound, "shape": [1024, 2048]}, *rows)) == 1
    assert kept({**bound, "gemm_us_at_least": 9.5}, *rows) == []


def test_a_geometric_mean() -> None:
    rows = [row(ratio_gemm=0.5), row(ratio_gemm=2.0, shape=(1, 2, 3))]
    assert kept({"at_most": {"ratio_gemm": 1.01}, "geometric_mean": True}, *rows) == [True]
    assert kept({"at_most": {"ratio_gemm": 0.99}, "geometric_mean": True}, *rows) == [False]


def test_a_geometric_mean_is_of_all_cases_of_one_file() -> None:
    goal = {"at_most": {"ratio_gemm": 1.2}, "geometric_mean": True, "op": "gemm", "shape": [[1, 2, 3], [4, 5, 6]]}
    small, large = (row("gemm", shape) for shape in ((1, 2, 3), (4, 5, 6)))
    # Half of the cases do not determine the mean.
    findings, unmeasured = check_goals.compare([goal], [small | {"ratio_gemm": 0.5}])
    assert findings == []
    assert "1 of 2 cases" in unmeasured[0]
    # A second, slower file has a mean of its own.
    slow = [row | {"file": "b", "ratio_gemm": 1.5} for row in (small, large)]
    assert kept(goal, *[row | {"file": "a"} for row in (small, large)], *slow) == [True, False]


def test_a_pattern_stands_for_the_quickest() -> None:
    goal = {"at_most": {"ratio_gemm": 1.0}, "algorithm": "own *"}
    rows = [
        row(),
        row(algorithm="own 64x256", us=9.0, ratio_gemm=1.0),
        row(algorithm="own 128x128", us=12.0, ratio_gemm=1.3),
    ]
    assert kept(goal, *rows) == [True]
    assert kept(goal, *rows[2:]) == [False]
    assert kept(goal, *rows[:1]) == []


def test_a_graph_of_another_run_is_no_measure_of_eager_calls() -> None:
    goal = {"at_most": {"over_graph": 1.05}, "mode": "eager"}
    rows = [row(file="slow", us=100.0), row(file="quick"), row(file="quick", mode="eager", us=11.0)]
    assert kept(goal, *rows) == [False]


def test_what_was_asked_for_and_left_out_falls_short() -> None:
    left_out = {"op": "ag_gemm", "name": "x", "shape": [64, 64, 64], "dtype": "bf16", "tp": 2, "mode": "graph",
                "why": "for want of time"}  # fmt: skip
    findings, _ = check_goals.compare([{"op": "ag_gemm", "at_most": {"ratio_gemm": 2.0}}], [row(name="y"), left_out])
    assert [finding.kept for finding in findings] == [True, False]
    assert "left out: for want of time" in str(findings[1])
    assert kept({"op": "gemm_rs", "at_most": {"ratio_gemm": 2.0}}, left_out) == []


def test_numbers_that_are_none_keep_nothing() -> None:
    assert kept({"at_most": {"ratio_gemm": 2.0}}, row(ratio_gemm=float("nan"))) == [False]
    assert "noisy" in str(check_goals.compare([{"at_most": {"ratio_gemm": 2.0}}], [row(noisy=True)])[0][0])
    # Without the product's own time there is no comparison.
    lacking = {key: value for key, value in row(comm_us=9.0).items() if key not in ("gemm_us", "ratio_gemm")}
    goal = {"at_most": {"ratio_gemm": 1.0, "floor_where_communication_bound": 1.0}}
    findings, unmeasured = check_goals.compare([goal], [lacking])
    assert findings == []
    assert unmeasured == ["ag_gemm [64, 64, 64] bf16 tp 2 graph: ratio_gemm, floor_where_communication_bound"]


def test_every_value_of_a_list_is_measured_or_named() -> None:
    goal = {"op": ["ag_gemm", "gemm_rs"], "shape": [64, 64, 64], "tp": [2, 4], "at_most": {"ratio_gemm": 2.0}}
    findings, unmeasured = check_goals.compare([goal], [row()])
    assert len(findings) == 1
    assert [("gemm_rs" in title, "tp 4" in title) for title in unmeasured] == [
        (False, True), (True, False), (True, True)
    ]  # fmt: skip
    sizes = {"op": "all_gather", "shape": [1024, 65536], "at_most": {"us": 20.0}}
    findings, unmeasured = check_goals.compare([sizes], [row("all_gather", 1024)])
    assert len(findings) == 1
    assert "shape 65536" in unmeasured[0]


def test_what_was_not_measured_is_named() -> None:
    findings, unmeasured = check_goals.compare([{"op": "gemm_rs", "at_most": {"us": 1}}], [row()])
    assert findings == []
    assert len(unmeasured) == 1
    assert "gemm_rs" in unmeasured[0]
    assert kept({"at_most": {"over_mpi": 1.0}}, row()) == []


def result_file(folder: Path, *rows: dict[str, Any], **more: Any) -> Path:
    path = folder / "result.json"
    texts = dict.fromkeys(("benchmark", "date", "gpu", "driver", "torch", "nccl", "commit", "command"), "x")
    path.write_text(json.dumps(texts | {"rows": rows} | more))
    return path


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "goals.json"
    wanted.write_text(json.dumps({"goals": [{"at_most": {"ratio_gemm": 1.2}}, {"op": "gemm", "at_most": {"us": 1}}]}))
    assert check_goals.check(wanted, [result_file(tmp_path, row())]) == 0
    assert "0 fall short, 1 not measured" in capsys.readouterr().out
    assert check_goals.check(wanted, [result_file(tmp_path, row(), row(ratio_gemm=1.3, name="slow"))]) == 1
    assert "SHORT ag_gemm slow bf16 tp 2 graph: ratio_gemm 1.300 of 1.2" in capsys.readouterr().out
    left_out = row() | {"why": "for want of time"}
    assert check_goals.check(wanted, [result_file(tmp_path, row(name="done"), left_out=[left_out])]) == 1
    assert "left out: for want of time" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected rows"):
        check_goals.check(wanted, [result_file(tmp_path)])
    with pytest.raises(ValueError, match="expected a result file"):
        check_goals.check(wanted, [wanted])
    with pytest.raises(ValueError, match="expected a file of goals"):
        check_goals.check(tmp_path / "none.json", [result_file(tmp_path, row())])
    wanted.write_text('{"goals": [{"op": "gemm"}]}')
    with pytest.raises(ValueError, match="expected a file of goals"):
        check_goals.check(wanted, [result_file(tmp_path, row())])


@pytest.mark.parametrize("name", ["goals.json", "goals_overlap.json"])
def test_the_goals_are_about_what_is_measured(name: str) -> None:
    measured = [
        row(case.op, case.shape if case.is_gemm else case.shape[0], mode, name=case.label, dtype=case.dtype, tp=tp,
            gemm_us=1e4, algorithm=algorithm)
        for op in KNOWN_OPS for kind in ("bf16", "fp8", "fp8_rows", "decode") for case in cases_of(op, kind)
        for algorithm in ("auto", "auto registered", "own 128x128") for mode in MODES for tp in (2, 4, 8)
    ]  # fmt: skip
    ratios = ("no communication", "nccl", "torch fused joined", "torch compiled", "torch async TP")
    whole = {"ratio_floor": 1.0, "ratio_peak": 1.0, "us": 1.0} | {f"over_{other}": 1.0 for other in ratios}
    measured += [
        row(op, (1,), mode, name=model, dtype="bfloat16", tp=tp, algorithm="auto") | whole
        for op in ("layer", "llama_step") for model in ("llama3-8b", "llama3-70b") for mode in MODES for tp in (2, 4)
    ]  # fmt: skip
    _, unmeasured = check_goals.compare(check_goals.read_goals(ROOT / "benchmarks" / name), measured)
    assert unmeasured == []


def test_no_way_of_a_peer_may_be_quicker() -> None:
    """No algorithm of a peer may be faster in any operation that has peers, captured or not."""
    wanted = check_goals.read_goals(ROOT / "benchmarks" / "goals.json")
    for op in (*OPS, *EXCHANGE_OPS):
        for mode in MODES:
            slow = row(op, 77, mode, ratio_peer=1.5, ratio_floor=1.0, gemm_us=1.0)
            findings, _ = check_goals.compare(wanted, [slow])
            assert op == "gemm" or [list(f.got) for f in findings if not f.kept] == [["ratio_peer"]], (op, mode)


def test_the_product_of_twelve_shapes_is_our_own() -> None:
    """The goal is that of our own kernels, not of the library."""
    of_products = [
        goal for goal in check_goals.read_goals(ROOT / "benchmarks" / "goals.json") if goal.get("op") == "gemm"
    ]
    cases = cases_of("gemm", "bf16")
    library, own = (
        [row("gemm", case.shape, name=case.label, algorithm=name, ratio_gemm=1.07) for case in cases]
        for name in ("auto", "own 128x128")
    )
    assert check_goals.compare(of_products, library)[0] == []
    mean, *each = check_goals.compare(of_products, own)[0]
    assert (mean.kept, [finding.kept for finding in each]) == (False, [True] * 12)
    assert "geometric mean of 12" in mean.what
