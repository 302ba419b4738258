"""The whole folder, on all GPUs (at most 4), from a plain pytest."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gpu_tests_pass_under_torchrun():
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs 2 GPUs, found {gpus}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={min(gpus, 4)}",
               "-m", "pytest", str(Path(__file__).parent), "-x", "-q"]  # fmt: skip
    assert subprocess.run(command, check=False).returncode == 0
