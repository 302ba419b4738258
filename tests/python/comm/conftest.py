"""The backends and sizes of the contract."""

import pytest

CPU = [("gloo", size) for size in (1, 2, 3, 4)] + [("local", size) for size in (1, 2, 3, 4, 8)]
GPU = [pytest.param("nccl", size, marks=pytest.mark.gpu(size)) for size in (1, 2, 3, 4, 8)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend, size`: every backend that moves data, in every size. `any_backend`: all four, in two ranks."""
    if {"backend", "size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("backend", "size"), [*CPU, *GPU])
    if "any_backend" in metafunc.fixturenames:
        nccl = pytest.param("nccl", marks=pytest.mark.gpu(2))
        metafunc.parametrize("any_backend", ["gloo", "local", "fake", nccl])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    names = request.node.callspec.params
    return "cuda" if names.get("backend", names.get("any_backend")) == "nccl" else "cpu"
