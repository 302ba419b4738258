"""A block by async TP gives the same as ours, with the collectives and products in the places chosen by torch's
compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

import torch_overlap as to
from torch_overlap.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from async_tp import Products, use_async_tp

FEATURES, HEADS, KV_HEADS, HIDDEN, BATCH = 24, 12, 6, 36, 2
FALLBACKS = {
    "fused_all_gather_matmul": "_fused_all_gather_matmul_fallback",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter_fallback",
}


def one_after_the_other(comm: to.TorchComm, told: list[str]) -> Products:
    """Records the names of the calls in `told`."""

    def gather_matmul(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        told.append(f"gather, {len(weights)}")
        gathered = to.ops.all_gather(x, comm, 0)
        return gathered, [gathered @ w for w in weights]

    def matmul_scatter(x: Tensor, weight: Tensor) -> Tensor:
        told.append("1, scatter")
        return to.ops.reduce_scatter(x @ weight, comm, 0)

    def scatter(x: Tensor) -> Tensor:
        told.append("scatter")
        return to.ops.reduce_scatter(x, comm, 0)

    return Products(gather_matmul, matmul_scatter, scatter)


def compare(comm: to.TorchComm, products: Products, joined: bool, activation: str, seed: int) -> None:
    """Returns the output and all gradients of a step, in fp64."""

    def make() -> tuple[Any, Tensor, Tensor]:
        torch.manual_seed(seed)
        block = to.nn.ParallelTransformerBlock(
            FEATURES, HEADS, HIDDEN, comm, kv_heads=KV_HEADS, activation=activation, norm="rms", bias=False,
            dtype=torch.float64, algorithm="sequential",
        )  # fmt: skip
        for norm in (block.attention_norm, block.mlp_norm):
            torch.nn.init.normal_(norm.weight)
        torch.manual_seed(seed + 1 + comm.get_rank())
        x, grad = torch.randn(2, 4, BATCH, FEATURES, dtype=torch.float64).unbind()
        return block, x.requires_grad_(), grad

    def step(block: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
        y = block(x)
        y.backward(grad)
        return [y.detach(), *(t.grad for t in (x, *block.parameters()))]

    wanted = step(*make())
    block, x, grad = make()
    use_async_tp(block, products, joined)
    got = step(block, x, grad)
    assert len(got) == len(wanted) - (joined and (3 if activation == "swiglu" else 2))
    parts = torch.cat([t.flatten() for t in got]).split([t.numel() for t in wanted])
    for part, want in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part, want.flatten(), rtol=1e-10, atol=1e-10)


def run_plain(comm: to.TorchComm, joined: bool, activation: str, seed: int) -> list[str]:
    told: list[str] = []
    compare(comm, one_after_the_other(comm, told), joined, activation, seed)
    return told


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_apart(size: int, seed: int) -> None:
    forward = ["gather, 3", "1, scatter", "gather, 2", "1, scatter"]
    told = run_ranks(run_plain, size, False, "swiglu", seed)
    assert told == [[*forward, "gather, 1", "scatter", "gather, 1", "scatter"]] * size


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_joined(size: int, activation: str, seed: int) -> None:
    told = run_ranks(run_plain, size, True, activation, seed)
    assert told == [["gather, 1", "1, scatter"] * 4] * size


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """torch's own reference of the fused operators, which it has for fake tensors, accepts CPU tensors."""
    library = torch.library.Library("symm_mem", "IMPL")
    try:
        for op, fallback in FALLBACKS.items():
            library.impl(op, getattr(symmetric, fallback), "CPU")
        yield
    finally:
        library._destroy()


def run_torch(rank: int, size: int, store: Any, joined: bool, seed: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    comm = to.new_comm("gloo", torch.device("cpu"), "async_tp", store=store, rank=rank, size=size)
    assert dist.group.WORLD is not None
    try:
        with on_the_cpu():
            compare(comm, Products.fused(dist.group.WORLD, torch.device("cpu")), joined, "swiglu", seed)
    finally:
        comm.finalize()


@pytest.mark.skipif(
    not all(hasattr(symmetric, name) for name in FALLBACKS.values()), reason="this torch has no such references"
)
@pytest.mark.parametrize("joined", [False, True])
def test_torchs_operators_take_what_they_are_given(joined: bool, seed: int) -> None:
    run_ranks(run_torch, 2, joined, seed, comm=False)
