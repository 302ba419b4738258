import random

import pytest


@pytest.fixture
def seed() -> int:
    return random.randrange(1 << 30)
