"""The whole folder, on all GPUs (at most 4), from a plain pytest; and tests that depend on the number of device
queues."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_overlap.testing import gpu_ranks

HERE = Path(__file__).parent


def torchrun(*arguments, **environment):
    """Returns the exit status of a program on all GPUs, at most 4."""
    ranks = min(gpu_ranks(), 4)
    if ranks < 2:
        pytest.skip(f"needs 2 ranks with a GPU, there can be {ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               *arguments]  # fmt: skip
    return subprocess.run(command, check=False, env={**os.environ, **environment}).returncode


PYTEST = ("-m", "pytest", "-x", "-q")


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gpu_tests_pass_under_torchrun():
    assert torchrun(*PYTEST, str(HERE)) == 0


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.parametrize("communicator", ["dropped", "kept"])
def test_ranks_that_exit_at_different_times(communicator):
    assert torchrun(str(HERE / "exit_cases.py"), communicator) == 0


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 8])
def test_overlap_with_any_number_of_queues(connections):
    """With one queue all work of a device starts in the order of issue, on any streams."""
    files = [str(HERE / name) for name in ("test_overlap.py", "test_overlap_graphs.py", "test_ops.py")]
    chosen = "eager_calls_at_full_shapes or late_rank or all_methods or (test_ops and p2p)"
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    assert torchrun(*PYTEST, *files, "-k", chosen, "-m", "not slow", **environment) == 0
