"""References for the modules: the same in plain torch, unsharded, in fp64."""

import os
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, os.path.dirname(__file__))  # float8_cases


class Problem:
    """Random tensors and layers in fp64, one after the other; equal for equal seeds."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=self.dtype)
        layer.weight = nn.Parameter(self(outputs, inputs))
        if bias:
            layer.bias = nn.Parameter(self(outputs))
        return layer


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return Problem
