import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # gemm_cases


@pytest.fixture(autouse=True)
def draws(seed: int) -> None:
    torch.manual_seed(seed)
