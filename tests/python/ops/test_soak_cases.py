"""The operators that tests/python/gpu/test_op_soak.py replays, with the algorithms that run without a GPU."""

import os
import sys

import pytest

from torch_overlap.testing import run_ranks

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gpu"))
from soak_cases import DTYPES, Inputs, cases_of


def every_case(comm, seed, dtype):
    found = {}
    for case in cases_of(dtype, has_fused=False):
        inputs = Inputs(comm, case, seed, dtype, device="cpu")
        found[case.name] = [inputs.run().item() for _ in range(3)]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("local", 3)])
def test_results_are_exact(seed, backend, size, dtype):
    for found in run_ranks(every_case, size, seed, dtype, backend=backend):
        assert len(found) >= 30
        assert {name: wrong for name, wrong in found.items() if any(wrong)} == {}
