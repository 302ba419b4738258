"""Tests with ranks that are processes, over gloo: every rank of a torchrun runs the tests whose ranks are threads."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STRESS = "TORCH_OVERLAP_STRESS" in os.environ
RANKS = 8 if STRESS else 4  # tests of more ranks are skipped
SAMPLE = 1 if STRESS else 20  # one test of so many, drawn anew each time
SECONDS = 600
FILES = ("autocast", "costs", "functions", "gradients", "images", "layouts", "moving", "operators", "pipeline",
         "products", "reducing", "reshapes", "reshard", "reshard_gradients", "same_everywhere", "vmap")  # fmt: skip


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(SECONDS + 60)
def test_cases_hold_on_processes(seed, tmp_path):
    """T1-T45, T52-T57, B1-B20, the parts about values and the operations sent."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1", "--redirects", "3",
                "--log-dir", str(tmp_path)]  # fmt: skip
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES]
    env = os.environ | {"TORCH_OVERLAP_TEST_RANKS": "torchrun", "TORCH_OVERLAP_TEST_SAMPLE": str(SAMPLE),
                        "TEST_SEED": str(seed), "OMP_NUM_THREADS": "1"}  # fmt: skip
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env.pop("TORCH_OVERLAP_STRESS", None)
    with subprocess.Popen([*torchrun, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m",
                           "not gpu", *tests], env=env, cwd=ROOT, start_new_session=True) as process:  # fmt: skip
        try:
            code = process.wait(SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    printed = [log.read_text()[-4000:] for log in sorted(tmp_path.glob("*/attempt_0/*/stdout.log"))]
    assert code == 0, printed[0] if printed else f"torchrun ended with {code}"
    passed = [int(found[1]) for text in printed if (found := re.search(r"(\d+) passed", text))]
    assert len(passed) == RANKS
    assert set(passed) == {passed[0]}, passed
    assert passed[0] > 400 // SAMPLE, printed[0]
