"""Transformer Engine's grid of layers at reduced shapes: overlapped, compared with the same layer without overlap.

Its layers, from one linear to two transformer layers, with the recipes of 8-bit floats, with the backward pass of a
column-parallel layer overlapped in bulk or as product + reduce-scatter, in pieces or through shared memory.
"""

from __future__ import annotations

import pytest
import torch
from covering import covering
from float8_cases import part
from torch import nn

from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FEATURES, HEADS, HIDDEN, SEQUENCE, BATCH = 192, 6, 384, 48, 2


def normed(comm, layer):
    """Returns the layer after a norm of this rank's rows, whose gradient is partial."""
    norm = nn.LayerNorm(FEATURES, dtype=next(layer.parameters()).dtype)
    tnn.mark_replicated(norm, comm)
    return nn.Sequential(norm, layer)


# The gradient of a key's bias is 0 except for rounding: attention does not have one.
LAYERS = {
    "row": lambda comm, **o: tnn.RowParallelLinear(HIDDEN, FEATURES, comm, **o),
    "column": lambda comm, **o: tnn.ColumnParallelLinear(FEATURES, HIDDEN, comm, **o),
    "norm and column": lambda comm, **o: normed(comm, tnn.ColumnParallelLinear(FEATURES, HIDDEN, comm, **o)),
    "norm and mlp": lambda comm, **o: normed(comm, tnn.ParallelMLP(FEATURES, HIDDEN, comm, **o)),
    "attention": lambda comm, **o: tnn.ParallelSelfAttention(FEATURES, HEADS, comm, bias=False, **o),
    "layer": lambda comm, **o: tnn.ParallelTransformerBlock(FEATURES, HEADS, HIDDEN, comm, bias=False, **o),
    "two layers": lambda comm, **o: nn.Sequential(
        *(tnn.ParallelTransformerBlock(FEATURES, HEADS, HIDDEN, comm, bias=False, **o) for _ in range(2))
    ),
}


def step(module, x, factor):
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    (y * factor).sum().backward()
    tnn.update_float8_scales(module)
    return {"y": y.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def close(name, got, want, dtype, fp8):
    """Compares all elements, relative to their mean square.

    float32: sums in another order; with 8-bit floats some of them round a value near the middle of two to the other:
    one term of a product by 2^-4. bfloat16: results, and the terms of a sum over ranks, are rounded to 2^-9, which
    changes one in sixteen 8-bit values.
    """
    size = want.double().square().mean().sqrt()
    error = (got.double() - want.double()).abs() / size
    most, mean = {torch.float32: (0.1, 0.02) if fp8 else (1e-4, 1e-5),
                  torch.bfloat16: (1.0, 0.1) if fp8 else (0.3, 0.02)}[dtype]  # fmt: skip
    wrong = ~(error <= most)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} are wrong, the worst by {error.max()}"
    assert error.square().mean().sqrt() <= mean, f"{name}: off by {error.square().mean().sqrt()} in the mean square"


def compare(comm, seed, name, scaling, dtype):
    fp8 = None if scaling is None else tnn.Float8Recipe(scaling)
    options = {"dtype": dtype, "fp8": fp8}
    torch.manual_seed(seed)
    plain = LAYERS[name](comm, algorithm="sequential", **options)
    overlapped = {algorithm: LAYERS[name](comm, algorithm=algorithm, **options)
                  for algorithm in ("bulk", "p2p", "pipelined")}  # fmt: skip
    for module in overlapped.values():
        module.load_state_dict(plain.state_dict())
    generator = torch.Generator().manual_seed(seed)
    is_row = name == "row"
    inputs = HIDDEN if is_row else FEATURES
    for _ in range(2):
        x = part(torch.randn(SEQUENCE, BATCH, inputs, generator=generator), -1 if is_row else 0, comm).to(dtype)
        outputs = plain(x).shape
        factor = torch.randn(outputs, generator=generator).to(dtype)
        want = step(plain, x, factor)
        for algorithm, module in overlapped.items():
            got = step(module, x, factor)
            assert got.keys() == want.keys()
            for key, value in want.items():
                close(f"{key} by {algorithm}", got[key], value, dtype, fp8)


@covering(
    {
        "name": list(LAYERS),
        "scaling": [None, "current", "delayed", "mxfp8", "block"],
        "size,dtype": [(2, torch.bfloat16), (3, torch.float32)],
    }
)
def test_overlap_changes_no_value(seed, size, name, scaling, dtype):
    run_ranks(compare, size, seed, name, scaling, dtype)
