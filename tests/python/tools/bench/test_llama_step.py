"""benchmarks/llama_step.py runs without a GPU, beside torch's own tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import Launcher

PROGRAM = Path(__file__).parents[4] / "benchmarks" / "llama_step.py"


@pytest.mark.slow
def test_two_ranks_without_a_gpu(launcher: Launcher, tmp_path: Path) -> None:
    code, output = launcher.run_ranks(2, PROGRAM, "--tiny", "--rounds", 1, "--algorithms", "auto", "--out", tmp_path)
    assert code == 0, output
    assert "expected finalize()" not in output
    (path,) = tmp_path.glob("llama_step-cpu-tp2-*.json")
    content = json.loads(path.read_text())
    assert [row["algorithm"] for row in content["rows"]] == ["nccl", "auto", "torch compiled"]
    assert content["missing"] == {"torch async TP": "needs CUDA"}
    for row in content["rows"]:
        assert row["us"] > row["floor"]["us"] > 0
        assert row["tokens_per_second"] == pytest.approx(1e6 * 8 * 64 / row["us"], rel=1e-4)


def test_batch_that_does_not_divide(launcher: Launcher) -> None:
    code, output = launcher.run_ranks(1, PROGRAM, "--tiny", "--batch", 6, "--accumulate", 4)
    assert code != 0
    assert "expected --batch divisible by --accumulate 4, got 6" in output
