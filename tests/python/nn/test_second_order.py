"""Gradients of gradients: of layers whose activations are whole on every rank, of losses, and of Sharded products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama_cases import start
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.mesh import P, choosing, connect, shard
from torch_overlap.nn.functional import copy_matmul, sum_matmul
from torch_overlap.nn.styles import ColumnParallel, RowParallel, VocabularyParallel, parallelize
from torch_overlap.testing import run_ranks

ROWS, IN, HIDDEN, OUT, VOCABULARY = 4, 6, 12, 5, 12


def draws(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random tensors. Ranks that are threads share torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def second(loss: Tensor, x: Tensor, others: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the squared gradient of x, of x and the others."""
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return list(torch.autograd.grad(grad.abs().square().sum(), [x, *others], allow_unused=True))


def loss_of(y: Tensor, linear: bool) -> Tensor:
    """A loss that is linear in y brings a gradient that needs none of its own."""
    return (y.real if y.dtype.is_complex else y).sum() if linear else y.abs().square().sum()


def close(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for one, other in zip(got, want, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero if one is None else one, zero if other is None else other)


def products(comm: to.TorchComm, seed: int, linear: bool, dtype: torch.dtype) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    x, w1, w3, w2, b1, b2 = draws(
        seed, (ROWS, IN), (HIDDEN, IN), (HIDDEN, IN), (OUT, HIDDEN), (HIDDEN,), (OUT,), dtype=dtype
    )
    y = F.linear(F.linear(x, w1, b1).tanh() * F.linear(x, w3), w2, b2)
    whole = second(loss_of(y, linear), x, [w1, w3, b1, w2, b2])

    def part(t: Tensor, dim: int) -> Tensor:
        return t.detach().chunk(size, dim)[rank].clone().requires_grad_()

    mine = [part(w1, 0), part(w3, 0), part(b1, 0), part(w2, 1), b2.detach().clone().requires_grad_()]
    own = x.detach().clone().requires_grad_()
    up, gate = copy_matmul(own, mine[:2], [mine[2], None], comm, "auto")
    y = sum_matmul(up.tanh() * gate, mine[3], mine[4], comm, "auto")
    got = second(loss_of(y, linear), own, mine)
    want = [None if t is None else t.chunk(size, dim)[rank] for t, dim in zip(whole[1:5], (0, 0, 0, 1), strict=True)]
    close(got, [whole[0], *want, whole[5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_products_of_whole_activations(size: int, linear: bool, dtype: torch.dtype, seed: int) -> None:
    run_ranks(products, size, seed, linear, dtype, backend="local")


def layers(comm: to.TorchComm, seed: int, sequence_parallel: bool, linear: bool) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    x, w1, w2 = draws(seed, (ROWS, IN), (HIDDEN, IN), (OUT, HIDDEN))
    whole = second(loss_of(F.linear(F.linear(x, w1).tanh(), w2), linear), x, [w1, w2])
    options = {"bias": False, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    up = tnn.ColumnParallelLinear(IN, HIDDEN, comm, **options)
    down = tnn.RowParallelLinear(HIDDEN, OUT, comm, **options)
    with torch.no_grad():
        up.weight.copy_(w1.chunk(size)[rank])
        down.weight.copy_(w2.chunk(size, 1)[rank])
    own = (x.chunk(size)[rank] if sequence_parallel else x).detach().clone().requires_grad_()
    got = second(loss_of(down(up(own).tanh()), linear), own, [up.weight, down.weight])
    assert whole[0] is not None
    assert whole[1] is not None
    assert whole[2] is not None
    want = [whole[0].chunk(size)[rank] if sequence_parallel else whole[0], whole[1].chunk(size)[rank],
            whole[2].chunk(size, 1)[rank]]  # fmt: skip
    close(got, list(want))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_layers(sequence_parallel: bool, linear: bool, seed: int) -> None:
    run_ranks(layers, 2, seed, sequence_parallel, linear, backend="gloo")


def cross_entropy(comm: to.TorchComm, seed: int, smoothing: float, reduction: str) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    x, w = draws(seed, (ROWS, IN), (VOCABULARY, IN))
    targets = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(seed))
    targets[1] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    whole = second(F.cross_entropy(F.linear(x, w), targets, **options).square().sum(), x, [w])
    own, mine = x.detach().clone().requires_grad_(), w.detach().chunk(size)[rank].clone().requires_grad_()
    (logits,) = copy_matmul(own, [mine], [None], comm, "auto")
    got = second(tnn.vocabulary_parallel_cross_entropy(logits, targets, comm, **options).square().sum(), own, [mine])
    assert whole[1] is not None
    close(got, [whole[0], whole[1].chunk(size)[rank]])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", [2, 3])
def test_cross_entropy(size: int, reduction: str, smoothing: float, seed: int) -> None:
    run_ranks(cross_entropy, size, seed, smoothing, reduction, backend="local")


def sharded_products(comm: to.TorchComm, seed: int, linear: bool) -> None:
    mesh = connect({"a": comm.get_size()}, comm)
    x, w, v = draws(seed, (ROWS, IN), (IN, HIDDEN), (HIDDEN, OUT))
    want = second(loss_of((x @ w).tanh() @ v, linear), x, [w, v])
    for mode in ("sequential", "auto"):
        for layout in (P(), P("a")):
            parts = [shard(t.detach().clone(), mesh, to_).requires_grad_()
                     for t, to_ in ((x, layout), (w, P(None, "a")), (v, P("a")))]  # fmt: skip
            with choosing(mode):
                got = second(loss_of((parts[0] @ parts[1]).tanh() @ parts[2], linear), parts[0], parts[1:])
            close([None if t is None else t.full() for t in got], want)
    mesh.close()


@pytest.mark.parametrize("linear", [False, True])
def test_sharded_products(linear: bool, seed: int) -> None:
    run_ranks(sharded_products, 2, seed, linear, backend="local")


def first_order_of_fp8(comm: to.TorchComm) -> None:
    for sequence_parallel in (False, True):
        options = {"bias": False, "sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe("current")}
        for layer in (
            tnn.ColumnParallelLinear(32, 64, comm, **options),
            tnn.RowParallelLinear(64, 32, comm, **options),
        ):
            x = torch.ones(32, layer.weight.size(1), requires_grad=True)
            with pytest.raises(to.UnsupportedError, match="expected create_graph=False through a layer with fp8"):
                torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_layers_with_fp8_refuse_it() -> None:
    run_ranks(first_order_of_fp8, 2, backend="gloo")


class Tied(nn.Module):
    """An embedding, an MLP with a norm, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        return self.head(x + self.down(self.up(self.norm(x)).tanh()))


def parameters_of_a_plan(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole, options = Tied().double(), {"sequence_parallel": False}
    plan = {"embedding": VocabularyParallel(), "up": ColumnParallel(**options), "down": RowParallel(**options),
            "head": ColumnParallel(gather_output=True, **options)}  # fmt: skip
    model = parallelize(copy.deepcopy(whole), mesh, plan)
    tokens = torch.randint(12, (2, 5))
    for one in (model, whole):
        parameters = list(one.parameters())
        grads = torch.autograd.grad(one(tokens).square().sum(), parameters, create_graph=True)
        full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        torch.stack([grad.square().sum() for grad in full]).sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-9)


def test_gradients_of_parameter_gradients_under_a_plan(seed: int) -> None:
    run_ranks(parameters_of_a_plan, 2, seed, comm=False)
