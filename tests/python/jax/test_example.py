"""The example trains, and its losses are those of plain JAX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Launcher

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("arguments", [["--steps", "4"], ["--steps", "3", "--processes", "2"]])
def test_losses_of_both_ways_are_equal(arguments):
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / "jax_mlp.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    # Lines of gloo's threads may be among those of the program.
    steps = re.findall(r"^ *(\d+)  \d+\.\d+  \d+\.\d+$", done.stdout, re.MULTILINE)
    assert steps == [str(step) for step in range(int(arguments[1]))]


def test_the_benchmark_runs_without_a_gpu(launcher: Launcher) -> None:
    """It compares the results of all ways."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    benchmark = [ROOT / "benchmarks" / "jax_overlap.py", "--rounds", "2"]
    process = launcher.fork("-m", *torchrun, *benchmark, JAX_ENABLE_X64="0", XLA_FLAGS="")
    assert process.wait() == 0, process.printed()
    assert re.findall(r"'op': '(\w+)'", process.printed()) == ["ag_gemm", "gemm_rs"]
