"""benchmarks/layer.py runs without a GPU, and writes a result of what it says that it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_ranks_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "benchmarks" / "layer.py"), "--tiny", "--rounds", "2", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("layer-cpu-tp2-*.json")
    rows = json.loads(path.read_text())["rows"]
    expected = {(model, way) for model in ("llama3-8b", "llama3-70b") for way in ("auto", "ring", "sequential")}
    assert {(row["name"], row["algorithm"]) for row in rows} == expected
    for row in rows:
        assert row["us"] > 0
        assert row["peers"]["nccl"] > 0
        assert row["predicted_us"] > 0
