"""The seed, and the folder on the path: rank processes import overlap_cases too."""

import os
import secrets
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture
def seed() -> int:
    """A fresh one for each test; TEST_SEED repeats one, which a failure prints."""
    value = int(os.environ.get("TEST_SEED") or secrets.randbelow(2**31))
    print(f"TEST_SEED={value}")
    return value
