"""One process per device, as jax.distributed starts them: the backends gloo and NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax_checks
import pytest

from torch_overlap.testing import gpu_ranks

FOLDER = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


MODES = ["gather_modes", "scatter_modes", "bulk_modes", "fp8_gather"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "checks"), [(2, list(jax_checks.CHECKS)), (3, MODES)])
def test_checks(size, checks, seed):
    run_processes(size, checks, seed, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_backend_optimization_level=0")


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.parametrize("captured", ["0", "1"])
def test_checks_on_gpus(seed, captured):
    """Also with every call in a command buffer, alone or with others."""
    if gpu_ranks() < 2:
        pytest.skip("needs 2 GPUs")
    run_processes(
        2,
        list(jax_checks.CHECKS),
        seed,
        JAX_PLATFORMS="cuda",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_FLAGS="--xla_gpu_graph_min_graph_size=1",
        CAPTURED=captured,
    )


def run_processes(size, checks, seed, **environment):
    coordinator = f"127.0.0.1:{free_port()}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ""} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2]), env.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / "process_rank.py"), coordinator, str(size), str(rank), str(seed), *checks],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
        assert "all checks are done" in output
