"""torch.func and forward-mode derivatives of layers: those of docs/explanation/modules.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from llama_cases import start
from torch import Tensor, func, nn

import torch_overlap as to
from torch_overlap.nn.styles import ColumnParallel, RowParallel, SharedGather, parallelize
from torch_overlap.testing import run_ranks

CASES = [(over, sequence_parallel) for over in ("mesh", "communicator") for sequence_parallel in (True, False)]
ADVICE = "without a tangent of forward-mode differentiation, got one. Use torch.autograd.functional.jvp."


def layers(rank: int, size: int, store: Any, seed: int, over: str, sequence_parallel: bool) -> tuple[nn.Module, Tensor]:
    mesh = start(rank, size, store)
    comm = mesh if over == "mesh" else to.comm_from_group(mesh.get_group())
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    torch.manual_seed(seed)
    up, down = to.nn.ColumnParallelLinear(8, 16, comm, **options), to.nn.RowParallelLinear(16, 8, comm, **options)
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nn.Sequential(up, down), x


def supported(rank: int, size: int, store: Any, seed: int, over: str, sequence_parallel: bool) -> None:
    model, x = layers(rank, size, store, seed, over, sequence_parallel)
    other = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    y = func.functional_call(model, other, (x,))
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model(x).square().sum().backward()
    torch.testing.assert_close(y, model(x))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(other[name].grad, parameter.grad)

    v = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.functional.jvp(model, x, v)[1], model(x + v) - model(x))  # it is linear
    leaf = x.clone().requires_grad_()
    (model(leaf) * v).sum().backward()
    torch.testing.assert_close(torch.autograd.functional.vjp(model, x, v)[1], leaf.grad)


@pytest.mark.parametrize(("over", "sequence_parallel"), CASES)
def test_functional_call_and_derivatives_of_autograd(seed: int, over: str, sequence_parallel: bool) -> None:
    run_ranks(supported, 2, seed, over, sequence_parallel, comm=False)


def batches(rank: int, size: int, store: Any, seed: int, over: str, sequence_parallel: bool) -> None:
    model, x = layers(rank, size, store, seed, over, sequence_parallel)
    examples = torch.stack([x, 2 * x, -x])
    expected = torch.stack([model(example) for example in examples])
    if sequence_parallel:
        with torch.no_grad():
            torch.testing.assert_close(func.vmap(model)(examples), expected)
    if not sequence_parallel or over == "mesh":
        with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
            func.vmap(model)(examples)
        return
    func.vmap(model)(examples).square().sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.square().sum().backward()
    torch.testing.assert_close(grads, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize(("over", "sequence_parallel"), CASES)
def test_vmap(seed: int, over: str, sequence_parallel: bool) -> None:
    run_ranks(batches, 2, seed, over, sequence_parallel, comm=False)


def refused(rank: int, size: int, store: Any, seed: int, over: str, sequence_parallel: bool) -> None:
    model, x = layers(rank, size, store, seed, over, sequence_parallel)
    for transform in (lambda: func.grad(lambda x: model(x).sum())(x), lambda: func.vjp(model, x),
                      lambda: func.jacrev(model)(x)):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"setup_context|cannot use C"):
            transform()
    for layer in model:
        given = x if layer is model[0] else model[0](x).detach()
        with forward_ad.dual_level(), pytest.raises(to.UnsupportedError, match=ADVICE):
            layer(forward_ad.make_dual(given, given))
        with pytest.raises(to.UnsupportedError, match=ADVICE):
            func.jvp(layer, (given,), (given,))
        with pytest.raises(to.UnsupportedError, match=ADVICE):
            func.jacfwd(layer)(given)


@pytest.mark.parametrize(("over", "sequence_parallel"), CASES)
def test_transforms_that_are_refused(seed: int, over: str, sequence_parallel: bool) -> None:
    run_ranks(refused, 2, seed, over, sequence_parallel, comm=False)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return out


def refused_plan(rank: int, size: int, store: Any) -> None:
    mesh, x = start(rank, size, store), torch.ones(2, 4, 8)
    shared = {"": SharedGather("gate", "up"), "down": RowParallel()}
    for plan in (shared, {"gate": ColumnParallel(), "up": ColumnParallel(), "down": RowParallel()}):
        model = parallelize(Gated(), mesh, plan)
        with forward_ad.dual_level(), pytest.raises(to.UnsupportedError, match=ADVICE):
            model(forward_ad.make_dual(x, x))


def test_forward_mode_of_a_plan_is_refused() -> None:
    run_ranks(refused_plan, 2, comm=False)
