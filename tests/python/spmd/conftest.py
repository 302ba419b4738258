import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # spmd_ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one test in TORCH_OVERLAP_TEST_SAMPLE, drawn by TEST_SEED: the same ones on every rank."""
    sample = int(os.environ.get("TORCH_OVERLAP_TEST_SAMPLE", 1))
    if sample > 1:
        draw = random.Random(os.environ["TEST_SEED"])
        items[:] = draw.sample(sorted(items, key=lambda item: item.nodeid), len(items) // sample)
