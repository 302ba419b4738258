"""Layers of no tokens, with any strides of their input: empty results, and gradients of weights that are 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

FEATURES, HIDDEN = 64, 64
INPUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.empty(0, 2, FEATURES),
    "column stride": lambda: torch.empty(0, 2, 2 * FEATURES)[..., ::2],
    "transposed": lambda: torch.empty(FEATURES, 2, 0).permute(2, 1, 0),
}


def layers(comm: to.TorchComm, recipes: tuple[str | None, ...], algorithms: tuple[str, ...]) -> None:
    failed = []
    for recipe in recipes:
        fp8 = None if recipe is None else tnn.Float8Recipe(recipe)
        for algorithm in algorithms:
            for sequence_parallel in (True, False):
                options = {"algorithm": algorithm, "sequence_parallel": sequence_parallel, "fp8": fp8}
                up = tnn.ColumnParallelLinear(FEATURES, HIDDEN, comm, **options)
                down = tnn.RowParallelLinear(HIDDEN, FEATURES, comm, **options)
                for name, make in INPUTS.items():
                    x = make().requires_grad_()
                    try:
                        y = down(torch.relu(up(x)))
                        y.sum().backward()
                        assert y.shape == x.shape
                        assert x.grad is not None
                        assert x.grad.shape == x.shape
                        for parameter in (*up.parameters(), *down.parameters()):
                            assert parameter.grad is None or not parameter.grad.any()
                    except Exception as error:
                        failed.append(f"{recipe} by {algorithm}, sequence {sequence_parallel}, {name}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("recipe", [None, "current", "delayed", "mxfp8", "block"])
def test_no_tokens_by_every_algorithm(recipe: str | None) -> None:
    algorithms = ("auto", "sequential", "pipelined", "p2p", "bulk", *(("low_latency",) if recipe is None else ()))
    run_ranks(layers, 2, (recipe,), algorithms, backend="local")
