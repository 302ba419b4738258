"""Goals and what falls short of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_overlap.bench import goals
from torch_overlap.bench.cases import MODES, OPS, cases_of

ROOT = Path(__file__).resolve().parents[3]


def row(op: str = "ag_gemm", shape: Any = (64, 64, 64), mode: str = "graph", **more: Any) -> dict[str, Any]:
    known = {"op": op, "shape": list(shape) if isinstance(shape, tuple) else shape, "dtype": "bf16", "tp": 2,
             "mode": mode, "algorithm": "auto", "us": 10.0, "iqr_us": 0.1, "gemm_us": 9.0, "ratio_gemm": 1.1,
             "ratio_floor": 1.05, "ratio_peer": 0.9, "peers": {"nccl": 20.0}}  # fmt: skip
    return known | more


def kept(goal: dict[str, Any], *rows: dict[str, Any]) -> list[bool]:
    findings, _ = goals.compare([goal], rows)
    return [finding.kept for finding in findings]


def test_bounds() -> None:
    assert kept({"at_most": {"ratio_gemm": 1.1}}, row()) == [True]
    assert kept({"at_most": {"ratio_gemm": 1.09}}, row()) == [False]
    # One of several is enough.
    assert kept({"at_most": {"ratio_gemm": 1.0, "ratio_floor": 1.05}}, row()) == [True]
    assert kept({"at_most": {"over_nccl": 0.5}}, row()) == [True]
    assert kept({"at_most": {"over_nccl": 0.4}}, row()) == [False]
    assert kept({"at_most": {"over_graph": 1.05}, "mode": "eager"}, row(), row(mode="eager", us=10.4)) == [True]
    assert kept({"at_most": {"over_graph": 1.05}, "mode": "eager"}, row(), row(mode="eager", us=10.6)) == [False]
    # In rounds where the product alone took longer, too.
    slow = {"mode": "eager", "at_most": {"over_graph": 1.05}}
    assert kept(slow, row(us=1000, gemm_us=900), row(mode="eager", us=1060, gemm_us=945)) == [True]
    assert kept(slow, row(us=1000, gemm_us=900), row(mode="eager", us=1060, gemm_us=900)) == [False]
    # But for a short one that would be the host's time.
    assert kept(slow, row(), row(mode="eager", us=10.6, gemm_us=9.45)) == [False]


def test_the_floor_counts_where_communication_takes_longer_than_the_product() -> None:
    goal = {"at_most": {"ratio_gemm": 1.0, "floor_where_communication_bound": 1.05}}
    assert kept(goal, row(comm_us=9.0)) == [True]
    assert kept(goal, row(comm_us=9.0, ratio_floor=1.06)) == [False]
    assert kept(goal, row(comm_us=8.9)) == [False]
    assert kept(goal, row(comm_us=8.9, ratio_gemm=1.0)) == [True]


def test_which_rows_a_goal_is_about() -> None:
    rows = [
        row(),
        row(algorithm="ring", ratio_gemm=9.0),
        row(tp=4),
        row(op="all_reduce", shape=1024),
        row(mode="eager"),
    ]
    bound = {"at_most": {"ratio_gemm": 2.0}}
    assert len(kept(bound, *rows)) == 4
    assert kept({**bound, "algorithm": "ring"}, *rows) == [False]
    assert len(kept({**bound, "tp": [2, 8]}, *rows)) == 3
    assert len(kept({**bound, "op": "ag_gemm", "shape": [64, 64, 64], "mode": "graph"}, *rows)) == 2
    assert len(kept({**bound, "shape": [[64, 64, 64], [1, 2, 3]]}, *rows)) == 3
    assert len(kept({**bound, "shape": [1024, 2048]}, *rows)) == 1
    assert kept({**bound, "gemm_us_at_least": 9.5}, *rows) == []


def test_a_geometric_mean() -> None:
    rows = [row(ratio_gemm=0.5), row(ratio_gemm=2.0, shape=(1, 2, 3))]
    assert kept({"at_most": {"ratio_gemm": 1.01}, "geometric_mean": True}, *rows) == [True]
    assert kept({"at_most": {"ratio_gemm": 0.99}, "geometric_mean": True}, *rows) == [False]


def test_what_was_not_measured_is_named() -> None:
    findings, unmeasured = goals.compare([{"op": "gemm_rs", "at_most": {"us": 1}}], [row()])
    assert findings == []
    assert len(unmeasured) == 1
    assert "gemm_rs" in unmeasured[0]
    assert kept({"at_most": {"over_mpi": 1.0}}, row()) == []


def result_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "result.json"
    texts = dict.fromkeys(("benchmark", "date", "gpu", "driver", "torch", "nccl", "commit", "command"), "x")
    path.write_text(json.dumps(texts | {"rows": rows}))
    return path


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "goals.json"
    wanted.write_text(json.dumps({"goals": [{"at_most": {"ratio_gemm": 1.2}}, {"op": "gemm", "at_most": {"us": 1}}]}))
    assert goals.check(wanted, [result_file(tmp_path, row())]) == 0
    assert "0 fall short, 1 goals not measured" in capsys.readouterr().out
    assert goals.check(wanted, [result_file(tmp_path, row(), row(ratio_gemm=1.3, name="slow"))]) == 1
    assert "SHORT ag_gemm slow bf16 tp 2 graph: ratio_gemm 1.300 of 1.2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected rows"):
        goals.check(wanted, [result_file(tmp_path)])
    with pytest.raises(ValueError, match="expected a result file"):
        goals.check(wanted, [wanted])
    with pytest.raises(ValueError, match="expected a file of goals"):
        goals.check(tmp_path / "none.json", [result_file(tmp_path, row())])
    wanted.write_text('{"goals": [{"op": "gemm"}]}')
    with pytest.raises(ValueError, match="expected a file of goals"):
        goals.check(wanted, [result_file(tmp_path, row())])


@pytest.mark.parametrize("name", ["goals.json", "goals_overlap.json"])
def test_the_goals_are_about_what_is_measured(name: str) -> None:
    measured = [
        row(case.op, case.shape if case.is_gemm else case.shape[0], mode, name=case.label, dtype=case.dtype, tp=tp,
            gemm_us=1e4)
        for op in OPS for kind in ("bf16", "fp8") for case in cases_of(op, kind) for mode in MODES for tp in (2, 4, 8)
    ]  # fmt: skip
    _, unmeasured = goals.compare(goals.read_goals(ROOT / "benchmarks" / name), measured)
    assert unmeasured == []
