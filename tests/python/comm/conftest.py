"""The backends and sizes of the contract. Modules of this folder that are no tests can be imported, also on ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SIZES = (1, 2, 3, 4, 8)
CPU = [("gloo", size) for size in SIZES[:-1]] + [("local", size) for size in SIZES]
FAKE = [("fake", size) for size in SIZES]
GPU = [pytest.param("nccl", size, marks=pytest.mark.gpu(size)) for size in SIZES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend, size`: every backend that moves data, in every size. `any_backend`: all four, in two ranks, or with
    `any_size` in every size."""
    if {"backend", "size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("backend", "size"), [*CPU, *GPU])
    if {"any_backend", "any_size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("any_backend", "any_size"), [*CPU, *FAKE, *GPU])
    elif "any_backend" in metafunc.fixturenames:
        nccl = pytest.param("nccl", marks=pytest.mark.gpu(2))
        metafunc.parametrize("any_backend", ["gloo", "local", "fake", nccl])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    names = request.node.callspec.params
    return "cuda" if names.get("backend", names.get("any_backend")) == "nccl" else "cpu"
