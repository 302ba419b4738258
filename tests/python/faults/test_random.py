"""Random operations against a reference: operation, dtype, size, group, sync or async, thread.

500 draws; `make stress` runs 10,000 (TORCH_OVERLAP_STRESS=20). TEST_SEED repeats a run, whose seed a failure prints.
gpu/test_random.py is the same over NCCL, with streams in addition.
"""

import os

import pytest
from random_draws import run_random

from torch_overlap.testing import run_ranks

DRAWS = 500 * int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_random_operations_agree_with_the_reference(backend: str, seed: int) -> None:
    run_ranks(run_random, 3, seed, DRAWS // 2, backend=backend, timeout=max(60.0, DRAWS / 5))
