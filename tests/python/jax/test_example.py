"""The example trains, and its losses are those of plain JAX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
