"""Windows move memory on gloo and local; on fake they only check arguments."""

import pytest

CPU = [("gloo", size) for size in (1, 2, 3, 4)] + [("local", size) for size in (1, 2, 3, 4)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `backend, size`: both backends that move data, in every size."""
    if {"backend", "size"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("backend", "size"), CPU)
    if "pair_backend" in metafunc.fixturenames:
        metafunc.parametrize("pair_backend", ["gloo", "local"])
