"""The backends and sizes of the contract. Helper modules of this folder can be imported, also on ranks."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SIZES = (1, 2, 3, 4, 8)
MOVE_DATA = ("gloo", "local", "nccl")


def contract(backends: Iterable[str], sizes: Sequence[int]) -> list[Any]:
    """Returns the parameters for every backend in every size."""
    pairs = [(backend, size) for backend in backends for size in sizes]
    return [pytest.param(*pair, marks=[pytest.mark.gpu(pair[1])] if pair[0] == "nccl" else []) for pair in pairs]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `backend, size` with every backend that moves data, in every size, and `any_backend` with all
    four, in two ranks, or with `any_size` in every size. The mark `sizes` selects some of them."""
    mark = metafunc.definition.get_closest_marker("sizes")
    sizes = mark.args if mark else SIZES
    if {"backend", "size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("backend", "size"), contract(MOVE_DATA, sizes))
    if {"any_backend", "any_size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("any_backend", "any_size"), contract((*MOVE_DATA, "fake"), sizes))
    elif "any_backend" in metafunc.fixturenames:
        nccl = pytest.param("nccl", marks=pytest.mark.gpu(2))
        metafunc.parametrize("any_backend", ["gloo", "local", "fake", nccl])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    names = request.node.callspec.params
    return "cuda" if names.get("backend", names.get("any_backend")) == "nccl" else "cpu"
