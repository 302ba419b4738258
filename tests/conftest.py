"""Fixtures and checks of all tests: the number of GPUs that a test needs, and the seed of its data."""

import gc
import os
import secrets
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from torch_overlap.testing import gpu_ranks

sys.path.insert(0, str(Path(__file__).parent))  # launcher
from launcher import Launcher

# torch resolves the name of every client of a TCPStore, which is slow if the name server drops queries.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Inductor's compiler workers are processes that import torch, for each rank; its kernels here are few.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Its kernels are scalar: with vectors the compiler takes three times as long, which is not about our operators.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# "auto" selects the same in tests whatever this machine's user has measured.
os.environ.setdefault("TORCH_OVERLAP_TUNE_CACHE", "")
# Tests of timeouts make dumps; those of a run are in a folder of their own.
os.environ.setdefault("TORCHCOMM_FR_DUMP_TEMP_FILE", tempfile.mkdtemp(prefix="torch_overlap_traces_") + "/rank_")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end: half of the time of a collection would go into looking for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = gpu_ranks()
    for item in items:
        for mark in item.iter_markers("gpu"):
            needed = mark.args[0] if mark.args else 1
            if needed > available:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} ranks with a GPU, there can be {available}"))
    # The start of Inductor takes longer than such a test: as neighbours they run in one process of pytest-xdist.
    items.sort(key=lambda item: item.get_closest_marker("inductor") is None)


@pytest.fixture
def seed() -> int:
    """Returns a new seed for each test; TEST_SEED repeats one, which a failure prints."""
    value = int(os.environ.get("TEST_SEED") or secrets.randbelow(2**31))
    print(f"TEST_SEED={value}")
    return value


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.kill_all()
