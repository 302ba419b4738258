"""benchmarks/train_step.py runs without a GPU, with both models of the example."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[4] / "benchmarks" / "train_step.py"


@pytest.mark.slow
def test_two_ranks_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(PROGRAM),
               "--tiny", "--rounds", "2", "--meshes", "tp=2,dp=2:tp=1", "--out", str(tmp_path)]  # fmt: skip
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "expected finalize()" not in done.stderr
    (path,) = tmp_path.glob("train_step-cpu-tp2-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["tp=2", "dp=2:tp=1"]
    for row in rows:
        assert row["us"] > 0
        assert "predicted_us" not in row  # it would be out of date as soon as the planner changes
    assert len(re.findall(r" Mtoken/s  predicted [0-9.]+ ", done.stdout)) == 2
