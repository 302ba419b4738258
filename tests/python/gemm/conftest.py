import os
import sys
from collections.abc import Callable

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # gemm_cases


@pytest.fixture(autouse=True)
def draws(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture
def data(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
