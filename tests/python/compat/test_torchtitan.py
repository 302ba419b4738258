"""The slot of torchtitan's linears: its signatures, and values and gradients beside one rank."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch_overlap.compat import torchtitan
from torch_overlap.testing import run_ranks

# Arguments of torchtitan 0.3.0, torchtitan/distributed/linear.py.
SIGNATURES = {
    "AllGatherLinear": ["x_shard_m", "w_shard_n", "bias_shard_n", "group", "group_name"],
    "AllGatherLinearMulti": ["x_shard_m", "wa_shard_n", "wb_shard_n", "group", "group_name"],
    "LinearReduceScatter": ["x_shard_k", "w_shard_k", "bias", "group", "group_name"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    kind = getattr(torchtitan, name)
    assert list(inspect.signature(kind.apply).parameters) == SIGNATURES[name]
    assert list(inspect.signature(kind.typecheck_forward).parameters) == SIGNATURES[name]


def test_signatures_of_the_installed_package() -> None:
    """Reads the source: the package itself needs a newer torch."""
    found = importlib.util.find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    folder = Path(next(iter(found.submodule_search_locations)))
    classes = {node.name: node for node in ast.parse((folder / "distributed/linear.py").read_text()).body
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    uses = ast.parse((folder / "models/common/dist_gemm.py").read_text())
    for name, arguments in SIGNATURES.items():
        methods = {node.name: [arg.arg for arg in node.args.args] for node in classes[name].body
                   if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert methods["forward"][1:] == methods["typecheck_forward"] == arguments
        calls = [node for node in ast.walk(uses) if isinstance(node, ast.Call)
                 and ast.unparse(node.func) == f"{name}.apply"]  # fmt: skip
        assert calls, f"{name} is not called by its name"
        assert all(len(call.args) == len(arguments) for call in calls)


def linears(rank: int, size: int, store: Any, seed: int) -> None:
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    generator = torch.Generator().manual_seed(seed)
    rows, inner, outer = 2 * size, 3 * size, 4 * size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    def part(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.detach().chunk(size, dim)[rank].clone().requires_grad_()

    x, wa, wb, ba, down, bd = draw(rows, inner), draw(outer, inner), draw(outer, inner), draw(outer), draw(
        inner, outer), draw(inner)  # fmt: skip
    own = [part(x, 0), part(wa, 0), part(wb, 0), part(ba, 0), part(down, 1), bd.detach().clone().requires_grad_()]
    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    first, second = torchtitan.AllGatherLinearMulti.apply(own[0], own[1], own[2], group, name)
    third = torchtitan.AllGatherLinear.apply(own[0], own[1], own[3], group, name)
    y = torchtitan.LinearReduceScatter.apply(F.silu(first) * second + third, own[4], own[5], group, name)
    want = F.linear(F.silu(F.linear(x, wa)) * F.linear(x, wb) + F.linear(x, wa, ba), down, bd)
    torch.testing.assert_close(y, want.chunk(size)[rank], rtol=1e-11, atol=1e-11)
    y.square().sum().backward()
    want.square().sum().backward()
    for got, whole, dim in zip(own, (x, wa, wb, ba, down, bd), (0, 0, 0, 0, 1, None), strict=True):
        grad = whole.grad if dim is None else whole.grad.chunk(size, dim)[rank]
        torch.testing.assert_close(got.grad, grad, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_linears_equal_one_rank(seed: int, size: int) -> None:
    run_ranks(linears, size, seed, comm=False)
