"""benchmarks/train_step.py runs without a GPU, with both models of the example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launcher import Launcher

PROGRAM = Path(__file__).parents[4] / "benchmarks" / "train_step.py"


@pytest.mark.slow
def test_two_ranks_without_a_gpu(launcher: Launcher, tmp_path: Path) -> None:
    options = ("--tiny", "--rounds", 2, "--meshes", "tp=2,dp=2:tp=1", "--out", tmp_path)
    code, output = launcher.run_ranks(2, PROGRAM, *options)
    assert code == 0, output
    assert "expected finalize()" not in output
    (path,) = tmp_path.glob("train_step-cpu-tp2-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["tp=2", "dp=2:tp=1"]
    for row in rows:
        assert row["us"] > 0
        assert "predicted_us" not in row  # it would be out of date as soon as the planner changes
    assert len(re.findall(r" Mtoken/s  predicted [0-9.]+ ", output)) == 2
