"""Random operations over NCCL against a reference: operation, dtype, size, group, sync or async, stream, thread.

500 draws; TORCH_OVERLAP_STRESS=20 makes 10,000. faults/random_draws.py defines the draws.
"""

import os

import pytest
from random_draws import run_random

pytestmark = pytest.mark.gpu(2)

DRAWS = 500 * int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))


@pytest.mark.stress
@pytest.mark.timeout(7200)
def test_random_operations_agree_with_the_reference(comm, seed):
    run_random(comm, seed, DRAWS)
