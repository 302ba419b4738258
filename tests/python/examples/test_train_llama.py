"""The llama example: short runs of the real program on real ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN_LLAMA = Path(__file__).resolve().parents[3] / "examples" / "train_llama.py"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "tolerance"),
                         [(("--recompute",), 1e-3), (("--dtype", "bfloat16", "--fp8", "current"), 0.1)])  # fmt: skip
def test_it_learns_as_on_one_rank(options, tolerance):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(TRAIN_LLAMA), "--device", "cpu", "--steps", "12", "--check-steps", "6", *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(value) for value in re.findall(r"step +\d+/12 +loss ([0-9.]+)", done.stdout)]
    assert losses[0] > 5.0, "a byte is one of 256: ln 256 = 5.5 at first"
    assert losses[-1] < losses[0] - 1.0
    difference = re.search(r"6 steps equal within ([0-9.e+-]+) ", done.stdout)
    assert difference is not None, done.stdout
    assert float(difference[1]) <= tolerance
    assert "tokens/s after 5 steps" in done.stdout


def test_sizes_that_do_not_divide():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(TRAIN_LLAMA),
               "--device", "cpu", "--batch", "6", "--accumulate", "4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "expected --batch divisible by --accumulate 4, got 6" in done.stderr
