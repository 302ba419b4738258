"""Weights of one gather in common memory, and gathers that a backward pass starts early."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama_cases import start
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap import ops
from torch_overlap.nn.styles import SharedGather, parallelize
from torch_overlap.testing import run_ranks

IN, SIZES = 8, (4, 12, 8)


def draws(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random tensors in fp64. Ranks that are threads share torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def full_layers(bias: bool, seed: int) -> list[nn.Linear]:
    layers = [nn.Linear(IN, size, bias=bias, dtype=torch.float64) for size in SIZES]
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.data = draws(seed + i, parameter.shape)[0]
    return layers


@torch.no_grad()
def are_neighbours(parts: list[Tensor]) -> bool:
    local = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
    return [part.data_ptr() for part in local[1:]] == [part.data_ptr() + part.nbytes for part in local[:-1]]


def check_layer(comm: to.TorchComm, layer: tnn.ColumnParallelLinear, linears: list[nn.Linear]) -> None:
    """Compares outputs and gradients with those of the whole layers."""
    rank, size = comm.get_rank(), comm.get_size()
    (x,) = draws(3, (4, 2, IN))
    mine = x.chunk(size)[rank].clone() if layer.sequence_parallel else x.clone()
    mine.requires_grad_()
    layer.zero_grad()
    outputs = layer(mine)
    expected = [linear(x) for linear in linears]
    grads = draws(4, *(y.shape for y in expected))
    torch.autograd.backward(outputs, [g.chunk(size, -1)[rank] for g in grads])
    for i, (y, g) in enumerate(zip(outputs, grads, strict=True)):
        torch.testing.assert_close(y, expected[i].chunk(size, -1)[rank])
        weight, bias = getattr(layer, f"weight{i}"), getattr(layer, f"bias{i}")
        torch.testing.assert_close(weight.grad, (g.flatten(0, 1).t() @ x.flatten(0, 1)).chunk(size)[rank])
        if bias is not None:
            torch.testing.assert_close(bias.grad, g.sum((0, 1)).chunk(size)[rank])
    whole = sum(g @ linear.weight for g, linear in zip(grads, linears, strict=True))
    torch.testing.assert_close(mine.grad, whole.chunk(size)[rank] if layer.sequence_parallel else whole)


def joined(comm: to.TorchComm, sequence_parallel: bool, bias: bool, seed: int) -> None:
    linears = full_layers(bias, seed)
    layer = tnn.ColumnParallelLinear.from_linear(linears, comm, sequence_parallel=sequence_parallel)
    made = tnn.ColumnParallelLinear(IN, SIZES, comm, bias=bias)
    for one in (layer, made, copy.deepcopy(layer), copy.deepcopy(layer).float().double()):
        assert are_neighbours(list(one.weights))
        assert not bias or are_neighbours(list(one.biases))
    before = [id(p) for p in layer.parameters()]
    check_layer(comm, layer, linears)
    assert are_neighbours([getattr(layer, f"weight{i}").grad for i in range(3)])
    check_layer(comm, layer.float().double(), [linear.float().double() for linear in linears])
    assert [id(p) for p in layer.parameters()] == before  # optimizers hold them

    others = full_layers(bias, seed + 1)
    state = tnn.ColumnParallelLinear.from_linear(others, comm).state_dict()
    layer.load_state_dict(state)
    assert are_neighbours(list(layer.weights))
    check_layer(comm, layer, others)
    apart = {name: value.clone() for name, value in state.items()}
    layer.load_state_dict(apart, assign=True)
    assert not are_neighbours(list(layer.weights))
    check_layer(comm, layer, others)
    addresses = [p.data_ptr() for p in layer.parameters()]
    layer.to("cpu")  # nothing moves: a captured graph may read it
    assert [p.data_ptr() for p in layer.parameters()] == addresses
    meta = tnn.ColumnParallelLinear(IN, SIZES, comm, bias=bias, device="meta").to_empty(device="cpu")
    assert are_neighbours(list(meta.weights))
    layer.weight1.data = layer.weight1.data.clone() + 1  # one that moves is not multiplied by its old values
    with torch.no_grad():
        others[1].weight += 1
    check_layer(comm, layer, others)

    if sequence_parallel:  # then outputs may be changed in place
        outputs = layer(torch.randn(2, 2, IN, dtype=torch.float64, requires_grad=True))
        outputs[0].mul_(2).sum().backward()
    if bias:  # whose value no gradient needs
        outputs = layer(torch.randn(2, 2, IN, dtype=torch.float64))
        with torch.no_grad():
            layer.bias0.add_(1)
        sum(y.sum() for y in outputs).backward()
    layer.zero_grad()
    layer.requires_grad_(False)
    layer.weight0.requires_grad_(True)
    (x,) = draws(5, (2, 2, IN))
    layer(x)[0].sum().backward()
    rows = layer.comm.get_size() if sequence_parallel else 1
    torch.testing.assert_close(layer.weight0.grad, (rows * x.sum((0, 1))).expand_as(layer.weight0))
    assert layer.weight1.grad is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_weights_of_one_gather_are_joined_and_stay_parameters(sequence_parallel: bool, bias: bool, seed: int) -> None:
    run_ranks(joined, 2, sequence_parallel, bias, seed, backend="local")


def side_by_side(comm: to.TorchComm, sequence_parallel: bool, seed: int) -> None:
    """Gradients in one buffer are used where they are if they follow each other; in any layout they are right."""
    layer = tnn.ColumnParallelLinear.from_linear(full_layers(False, seed), comm, sequence_parallel=sequence_parallel)
    (x,) = draws(seed, (2, 2, IN))
    outputs = layer(x.requires_grad_())
    (whole,) = draws(seed + 1, (2, 2, sum(SIZES)))
    layouts = {
        "follow each other": whole.split(SIZES, -1),
        "another order": whole.split(SIZES[::-1], -1)[::-1],
        "a gap": [*F.pad(whole, (0, 1))[..., :-1].split(SIZES, -1)[:2], F.pad(whole, (0, 1))[..., -SIZES[-1] :]],
        "expanded": tuple(whole[..., :1].expand(2, 2, size) for size in SIZES),
    }
    for name, grads in layouts.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = torch.autograd.grad(outputs, (x, *layer.weights), grads, retain_graph=True)
        wanted = sum(grad @ weight for grad, weight in zip(grads, layer.weights, strict=True))
        torch.testing.assert_close(found[0], wanted)
        for got, grad in zip(found[1:], grads, strict=True):
            torch.testing.assert_close(got, grad.flatten(0, 1).t() @ x.flatten(0, 1))
        is_copied = any(event.name == "aten::cat" for event in profile.events())
        assert is_copied == (name != "follow each other"), name


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_that_follow_each_other_are_not_copied(sequence_parallel: bool, seed: int) -> None:
    run_ranks(side_by_side, 1, sequence_parallel, seed, backend="local")


# --- Over a mesh: the parameters are DTensors ----------------------------------------------------

PROJECTIONS = ("wq", "wk", "wv")


class Projections(nn.Module):
    """Three linears of one input, whose weights have different numbers of rows."""

    def __init__(self, bias: bool, device: str = "cpu") -> None:
        super().__init__()
        for name, size in zip(PROJECTIONS, SIZES, strict=True):
            setattr(self, name, nn.Linear(IN, size, bias=bias, dtype=torch.float64, device=device))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(hidden_states).sin().square().sum(-1, True) for name in PROJECTIONS], -1)


def shared(mesh: DeviceMesh, model: nn.Module, sequence_parallel: bool) -> Any:
    return parallelize(model, mesh, {"": SharedGather(*PROJECTIONS, sequence_parallel=sequence_parallel)})


def parameters_of(model: nn.Module, what: str) -> list[Any]:
    return [getattr(model, name).get_parameter(what) for name in PROJECTIONS]


def check_shared(model: nn.Module, whole: nn.Module, sequence_parallel: bool, rank: int, size: int) -> None:
    """Compares outputs summed over the features, and gradients, with those of the whole model."""
    (x,) = draws(6, (2, 4, IN))
    model.zero_grad()
    whole.zero_grad()
    mine = (x.chunk(size, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
    y = model(mine)
    y.square().sum().backward()
    other = copy.deepcopy(whole)  # of this rank's features
    for name in PROJECTIONS:
        linear = getattr(other, name)
        for own in linear.parameters():
            own.data = own.detach().chunk(size)[rank].clone()
    full = x.clone().requires_grad_()
    want = other(full)
    torch.testing.assert_close(y, want)
    want.square().sum().backward()
    dist.all_reduce(full.grad)
    assert full.grad is not None
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, full.grad.chunk(size, 1)[rank] if sequence_parallel else full.grad)
    for name, parameter in other.named_parameters():
        grad = model.get_parameter(name).grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.to_local(), parameter.grad)


def joined_shared(rank: int, size: int, store: Any, sequence_parallel: bool, bias: bool, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Projections(bias)
    kinds = ("weight", "bias") if bias else ("weight",)
    model = shared(mesh, copy.deepcopy(whole), sequence_parallel)
    before = [id(p) for p in model.parameters()]
    for one in (
        model,
        copy.deepcopy(model),
        copy.deepcopy(model).float().double(),
        copy.deepcopy(copy.deepcopy(model)),
    ):
        assert all(are_neighbours(parameters_of(one, kind)) for kind in kinds)
    check_shared(model, whole, sequence_parallel, rank, size)
    assert are_neighbours([parameter.grad for parameter in parameters_of(model, "weight")])  # no copy put them there
    torch.optim.AdamW(model.parameters(), 0.1).step()
    assert are_neighbours(parameters_of(model, "weight"))
    model.float().double()
    assert are_neighbours(parameters_of(model, "weight"))
    assert [id(p) for p in model.parameters()] == before
    tnn.load_full_state_dict(model, whole.state_dict())
    check_shared(model, whole, sequence_parallel, rank, size)
    state = copy.deepcopy(model.state_dict())
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in whole.state_dict().items())

    meta = shared(mesh, Projections(bias, "meta"), sequence_parallel).to_empty(device="cpu")
    assert all(are_neighbours(parameters_of(meta, kind)) for kind in kinds)
    tnn.load_full_state_dict(meta, whole.state_dict())
    check_shared(meta, whole, sequence_parallel, rank, size)

    meta.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)  # other memory
    assert not are_neighbours(parameters_of(meta, "weight"))
    addresses = [p.to_local().data_ptr() for p in meta.parameters()]
    meta.to("cpu")  # nothing moves: a captured graph may read it
    assert [p.to_local().data_ptr() for p in meta.parameters()] == addresses
    check_shared(meta, whole, sequence_parallel, rank, size)

    y = model(draws(7, (2, 4 // size if sequence_parallel else 4, IN))[0].requires_grad_())
    with torch.no_grad():
        model.wk.weight.to_local().add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|inplace)"):
        y.sum().backward()
    dist.barrier()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_linears_that_share_a_gather_are_joined_over_a_mesh(sequence_parallel: bool, bias: bool, seed: int) -> None:
    run_ranks(joined_shared, 2, sequence_parallel, bias, seed, comm=False)


def layer_over_a_mesh(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    linears = full_layers(True, seed)
    layer = tnn.ColumnParallelLinear.from_linear(linears, mesh)
    made = tnn.ColumnParallelLinear(IN, SIZES, mesh)
    meta = tnn.ColumnParallelLinear(IN, SIZES, mesh, device="meta").to_empty(device="cpu")
    for one in (layer, made, meta, copy.deepcopy(layer), copy.deepcopy(layer).float().double()):
        assert are_neighbours(list(one.weights))
        assert are_neighbours(list(one.biases))
    (x,) = draws(3, (4, 2, IN))
    mine = x.chunk(size)[rank].clone().requires_grad_()
    outputs = layer(mine)
    grads = draws(4, *((4, 2, features) for features in SIZES))
    torch.autograd.backward(outputs, [g.chunk(size, -1)[rank] for g in grads])
    for i, (y, g, linear) in enumerate(zip(outputs, grads, linears, strict=True)):
        torch.testing.assert_close(y, linear(x).chunk(size, -1)[rank])
        got = getattr(layer, f"weight{i}").grad.full_tensor()
        torch.testing.assert_close(got, g.flatten(0, 1).t() @ x.flatten(0, 1))
        torch.testing.assert_close(getattr(layer, f"bias{i}").grad.full_tensor(), g.sum((0, 1)))


def test_a_layer_over_a_mesh_is_joined(seed: int) -> None:
    run_ranks(layer_over_a_mesh, 2, seed, comm=False)


def two_layers(x: Tensor, w1: Tensor, w2: Tensor, comm: to.TorchComm, dim: int, algorithm: str, early: bool) -> Tensor:
    (h,), _ = ops.all_gather_matmul(x, [w1], comm, gather_dim=dim, algorithm=algorithm)
    regather = x.detach() if early else None
    return ops.matmul_reduce_scatter(F.silu(h), w2, comm, scatter_dim=dim, algorithm=algorithm, regather=regather)


def gradients(comm: to.TorchComm, seed: int, dim: int, algorithm: str, early: bool, mode: str) -> list[Tensor]:
    x, w1, w2 = draws(seed, (3, 2, IN), (6, IN), (IN, 6))
    x, w1, w2 = (x + comm.get_rank()).requires_grad_(), w1.requires_grad_(), w2.requires_grad_()
    args = (x, w1, w2, comm, dim, algorithm, early)
    y = checkpoint(two_layers, *args, use_reentrant=mode == "reentrant") if mode else two_layers(*args)
    y.square().sum().backward()
    return [x.grad, w1.grad, w2.grad]  # type: ignore[list-item]


def early_gathers(comm: to.TorchComm, seed: int, algorithm: str) -> None:
    for dim in (0, 1):
        expected = gradients(comm, seed, dim, algorithm, False, "")
        for mode in ("", "plain", "reentrant"):
            for got, want in zip(gradients(comm, seed, dim, algorithm, True, mode), expected, strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("algorithm", ["auto", "sequential", "pipelined", "p2p", "bulk"])
@pytest.mark.parametrize(("backend", "size"), [("local", 3), ("gloo", 2)])
def test_an_early_gather_changes_no_gradient(backend: str, size: int, algorithm: str, seed: int) -> None:
    run_ranks(early_gathers, size, seed, algorithm, backend=backend)


def gathers_of(comm: to.TorchComm, seed: int, early: bool) -> int:
    to.flight_recorder.reset()
    gradients(comm, seed, 0, "sequential", early, "")
    entries = json.loads(to.flight_recorder.dump_json())["entries"]
    return sum("all_gather" in entry["profiling_name"] for entry in entries)


def test_an_early_gather_replaces_the_later_one(seed: int) -> None:
    for early in (False, True):  # forward, gradient of the sum, gradient of the weight
        assert run_ranks(gathers_of, 2, seed, early, backend="gloo") == [3, 3]


def unused_gathers(comm: to.TorchComm) -> None:
    x, w1, w2, other = draws(comm.get_rank(), (2, IN), (6, IN), (IN, 6), (2, IN))
    w1.requires_grad_()
    w2.requires_grad_()
    (h,), _ = ops.all_gather_matmul(x, [w1], comm)
    y = ops.matmul_reduce_scatter(h, w2, comm, regather=other)  # not the x of the product
    y.sum().backward(retain_graph=True)
    first = w1.grad.clone()
    w1.grad = None
    y.sum().backward()
    torch.testing.assert_close(w1.grad, first)
    (grad,) = torch.autograd.grad(ops.matmul_reduce_scatter(h.detach(), w2, comm, regather=x).sum(), w2)
    assert grad.isfinite().all()  # nothing takes that gather
    comm.barrier(False)
    with pytest.raises(to.InvalidValueError, match="regather"):
        ops.matmul_reduce_scatter(h.detach(), w2, comm, regather=torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_gather_that_nothing_takes_is_waited_for_and_released(backend: str) -> None:
    run_ranks(unused_gathers, 2, backend=backend)
