"""State dicts of DTensors: torch.distributed.checkpoint saves them on some ranks and loads them on others."""

from __future__ import annotations

import llama_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama_cases import Llama, plan
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.nn.styles import comm_of
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)


def start(rank, size, store, dp=1):
    return llama_cases.start(rank, size, store, (dp, size // dp), ("dp", "tp"))


def make_layers(comm, seed):
    """All layers; grouped heads and a gated MLP, whose projections share a gather; delayed scales; a tied weight."""
    torch.manual_seed(seed)
    fp8 = tnn.Float8Recipe("delayed", amax_history_len=3)
    block = tnn.ParallelTransformerBlock(16, 8, 64, comm, kv_heads=4, activation="swiglu", norm="rms")
    model = nn.ModuleDict({
        "block": checkpoint_wrapper(block),  # has names of its own
        "columns": tnn.ColumnParallelLinear(16, [32, 64, 16], comm),
        "tied": tnn.ColumnParallelLinear(16, 32, comm, bias=False),
        "rows": tnn.RowParallelLinear(64, 16, comm),
        "float8": tnn.ParallelMLP(64, 64, comm, fp8=fp8),
        "plain": nn.Linear(16, 16),
    })  # fmt: skip
    model["tied"].weight = model["columns"].weight0
    return model


def step_of_float8(layer, comm, seed):
    torch.manual_seed(seed + comm.get_rank())
    layer(torch.randn(16, 64)).square().sum().backward()
    tnn.update_float8_scales(layer)
    layer.zero_grad()


def save_layers(rank, size, store, seed, folder):
    mesh = start(rank, size, store)["tp"]
    comm = comm_of(mesh)
    model = make_layers(comm, seed)
    step_of_float8(model["float8"], comm, seed)
    state = tnn.sharded_state_dict(model, mesh)
    assert list(state) == list(model.state_dict())
    dcp.save(state, checkpoint_id=folder)
    full = tnn.full_state_dict(model)
    for name, value in state.items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), full[name]), name
    dist.destroy_process_group()
    return full


def load_layers(rank, size, store, seed, folder, saved):
    mesh = start(rank, size, store)["tp"]
    comm = comm_of(mesh)
    model = make_layers(comm, seed + 1)
    before = {name: id(p) for name, p in model.named_parameters()}
    state = tnn.sharded_state_dict(model, mesh)
    dcp.load(state, checkpoint_id=folder)
    assert str(tnn.load_sharded_state_dict(model, state)) == "<All keys matched successfully>"
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(module.started for module in model["float8"].modules() if hasattr(module, "started"))
    again = tnn.full_state_dict(model)
    assert list(again) == list(saved)
    for name, value in saved.items():
        assert torch.equal(again[name], value), name
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_loads_on_any_number(tmp_path, seed, size):
    """Each of several projections in one layer is split by itself, under a key of its own."""
    saved, other = run_ranks(save_layers, 2, seed, str(tmp_path), comm=False)
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    assert saved["columns.weight1"].shape == (64, 16)
    assert saved["block.attention.qkv.weight2"].shape == (8, 16)
    run_ranks(load_layers, size, seed, str(tmp_path), saved, comm=False)


def whole_llama(seed):
    torch.manual_seed(seed)
    return Llama(4, True)


def save_llama(rank, size, store, seed, folder):
    mesh = start(rank, size, store)["tp"]
    model = parallelize_module(whole_llama(seed), mesh, plan(True))
    dcp.save(tnn.sharded_state_dict(model, mesh), checkpoint_id=folder)
    dist.destroy_process_group()


def load_llama(rank, size, store, seed, folder):
    mesh = start(rank, size, store)["tp"]
    model = parallelize_module(whole_llama(seed + 1), mesh, plan(True))
    state = tnn.sharded_state_dict(model, mesh)
    dcp.load(state, checkpoint_id=folder)
    tnn.load_sharded_state_dict(model, state)
    split = tnn.split_parameters(model)
    assert len(split) == 2 * (7 + 5) + 1
    for name, value in whole_llama(seed).state_dict().items():
        got = model.state_dict()[name]
        assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, value), name
    dist.destroy_process_group()


def test_a_plan_saves_the_whole_model_and_loads_on_other_ranks(tmp_path, seed):
    """Heads and features of 2 ranks and of 1, and the model of one process, without DTensors."""
    folder = str(tmp_path)
    run_ranks(save_llama, 2, seed, folder, comm=False)
    run_ranks(load_llama, 1, seed, folder, comm=False)
    whole = whole_llama(seed + 1)
    state = whole.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    whole.load_state_dict(state)
    for name, value in whole_llama(seed).state_dict().items():
        assert torch.equal(whole.state_dict()[name], value), name


def over_communicators(rank, size, store, seed, folder):
    """Uses meshes of communicators: torch_overlap.device_mesh."""
    world = to.new_comm("gloo", "cpu", "world", store=store, rank=rank, size=size)
    tp = world.split([0, 1] if rank < 2 else [2, 3], "tp")
    dp = world.split([rank % 2, rank % 2 + 2], "dp")
    mesh = to.device_mesh.init_device_mesh([dp, tp], ["dp", "tp"], world)
    torch.manual_seed(seed)
    layer, other = (tnn.ParallelMLP(6, 8, tp) for _ in range(2))
    dcp.save(tnn.sharded_state_dict(layer, mesh["tp"]), checkpoint_id=folder)
    state = tnn.sharded_state_dict(other, mesh["tp"])
    dcp.load(state, checkpoint_id=folder)
    for name, value in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name  # in place
    dist.destroy_process_group()


def test_over_a_mesh_of_communicators(tmp_path, seed):
    run_ranks(over_communicators, 4, seed, str(tmp_path), comm=False)


def with_fsdp(rank, size, store, seed, dp, folder, saves):
    mesh = start(rank, size, store, dp)
    comm = comm_of(mesh["tp"])
    whole = make_whole(seed)
    torch.manual_seed(seed if saves else seed + 1)
    model = tnn.ParallelMLP(8, 18, comm)
    if saves:
        tnn.load_full_state_dict(model, whole)
    fully_shard(model, mesh=mesh["dp"])
    if saves:
        assert all(torch.equal(value, whole[name]) for name, value in tnn.full_state_dict(model).items())
    state = tnn.sharded_state_dict(model, mesh["dp", "tp"])
    if saves:
        dcp.save(state, checkpoint_id=folder)
        for name, value in state.items():
            assert torch.equal(value.full_tensor(), whole[name]), name
    else:
        dcp.load(state, checkpoint_id=folder)
        loaded = {name: value.clone() if isinstance(value, DTensor) else value for name, value in state.items()}
        for value in state.values():
            value.to_local().zero_()
        tnn.load_sharded_state_dict(model, loaded)
        model.unshard()
        for name, (value, dim) in tnn.split_parameters(model).items():
            assert torch.equal(value, whole[name].chunk(comm.get_size(), dim)[comm.get_rank()]), name
        assert torch.equal(model.down.bias, whole["down.bias"])
    dist.destroy_process_group()


def train(model, optimizer, steps, seed):
    """Runs steps whose gradients are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 2, 8, generator=generator, dtype=torch.float64)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_trained(mesh, seed, dp, comm):
    torch.manual_seed(seed)
    options = {"sequence_parallel": False, "dtype": torch.float64}
    model = nn.Sequential(nn.Linear(8, 8).double(), tnn.ParallelMLP(8, 18, comm, activation="swiglu", **options))
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    mesh = mesh["dp", "tp"] if dp > 1 else mesh["tp"]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)
    return model, optimizer, mesh


def sharded_states(model, optimizer, mesh):
    return {"model": tnn.sharded_state_dict(model, mesh),
            "optimizer": tnn.sharded_optimizer_state_dict(model, optimizer, mesh)}  # fmt: skip


def whole_states(model, optimizer, mesh):
    state = tnn.sharded_optimizer_state_dict(model, optimizer, mesh)
    whole = {f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
             for name, values in state["state"].items() for key, value in values.items()}  # fmt: skip
    return {name: value.clone() for name, value in (whole | tnn.full_state_dict(model)).items()}


def resumed(rank, size, store, seed, dp, folder, saved=None):
    mesh = start(rank, size, store, dp)
    comm = comm_of(mesh["tp"])
    model, optimizer, mesh = make_trained(mesh, seed + (saved is not None), dp, comm)
    if saved is None:
        train(model, optimizer, 3, seed)
        optimizer.param_groups[1]["lr"] = 0.02
        dcp.save(sharded_states(model, optimizer, mesh), checkpoint_id=folder)
    else:
        state = sharded_states(model, optimizer, mesh)
        dcp.load(state, checkpoint_id=folder)
        tnn.load_sharded_state_dict(model, state["model"])
        tnn.load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
    states = [whole_states(model, optimizer, mesh)]
    rates = [group["lr"] for group in optimizer.param_groups]
    train(model, optimizer, 2, seed + 1)
    states.append(whole_states(model, optimizer, mesh))
    if saved is not None:
        assert rates == [0.01, 0.02]
        assert set(states[0]) == set(saved[0])
        for name, value in saved[0].items():
            assert torch.equal(states[0][name], value), name
        for name, value in saved[1].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()
    return states


@pytest.mark.parametrize(("first", "then"), [((2, 1), (3, 1)), ((2, 1), (1, 1)), ((4, 2), (2, 1)), ((2, 1), (4, 2))])
def test_training_goes_on_with_other_ranks(tmp_path, seed, first, then):
    """(ranks, dp): includes the optimizer's state and its groups; the steps after it equal those of the first ranks."""
    saved = run_ranks(resumed, first[0], seed, first[1], str(tmp_path), comm=False)[0]
    assert saved[0]["1.up.weight1.exp_avg"].shape == (18, 8)
    run_ranks(resumed, then[0], seed, then[1], str(tmp_path), saved, comm=False)


def make_whole(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight0": (18, 8), "up.bias0": (18,), "down.weight": (8, 18), "down.bias": (8,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("ranks", "dp"), [(4, 2), (2, 2), (2, 1), (4, 4), (3, 1)])
def test_with_fsdp_over_another_dimension(tmp_path, seed, ranks, dp):
    """Saved by 2 x 2 ranks. fully_shard splits a rank's part of the weights, along the same dimension or another."""
    run_ranks(with_fsdp, 4, seed, 2, str(tmp_path), True, comm=False)
    run_ranks(with_fsdp, ranks, seed, dp, str(tmp_path), False, comm=False)


def errors(rank, size, store):
    mesh = start(rank, size, store)
    comm = comm_of(mesh["tp"])
    layer = tnn.ColumnParallelLinear(6, 8, comm)
    with pytest.raises(ValueError, match=rf"expected rank {rank} of 2 in the last dimension of the mesh for 'weight', "
                                         rf".*, got rank 0 of 1 in DeviceMesh"):  # fmt: skip
        tnn.sharded_state_dict(layer, mesh["dp"])
    state = tnn.sharded_state_dict(layer, mesh["tp"])
    with pytest.raises(ValueError, match=r"expected 'weight' as a DTensor of shape \[8, 6\], got a tensor of shape "
                                         r"\[4, 6\]; load into what"):  # fmt: skip
        tnn.load_sharded_state_dict(layer, layer.state_dict())
    other = DTensor.from_local(torch.ones(8, 3), mesh["tp"], [Shard(1)], run_check=False)
    with pytest.raises(ValueError, match=r"expected 'weight' of shape \[8, 6\] and \[Shard\(dim=0\)\], got \[8, 6\] "
                                         r"and \[Shard\(dim=1\)\]"):  # fmt: skip
        tnn.load_sharded_state_dict(layer, {**state, "weight": other})
    with pytest.raises(RuntimeError, match="Missing key"):
        tnn.load_sharded_state_dict(layer, {"weight": state["weight"]})
    with pytest.raises(
        ValueError, match=r"got \[16, 6\] and \[Shard\(dim=0\)\]; load into what sharded_state_dict of this"
    ):
        tnn.load_sharded_state_dict(layer, tnn.sharded_state_dict(tnn.ColumnParallelLinear(6, 16, comm), mesh["tp"]))
    factored = torch.optim.Adafactor(layer.parameters())
    with pytest.raises(ValueError, match=r"of 'weight.row_var': expected a state of one element or of shape \[4, 6\], "
                                         r".*, got \[4, 1\]"):  # fmt: skip
        tnn.sharded_optimizer_state_dict(layer, factored, mesh["tp"])
    momentum = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    states = tnn.sharded_optimizer_state_dict(layer, momentum, mesh["tp"])
    states["state"]["weight"]["momentum_buffer"] = torch.zeros(8, 6)
    with pytest.raises(ValueError, match=r"expected 'weight.momentum_buffer' as a DTensor of shape \[8, 6\], got a "):
        tnn.load_sharded_optimizer_state_dict(layer, momentum, states)
    fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"expected a mesh of the dimensions that fully_shard has for 'weight' and "
                                         r"then 2 ranks, \(1, 2\), got DeviceMesh.*; write mesh\["):  # fmt: skip
        tnn.sharded_state_dict(layer, mesh["tp"])
    dist.destroy_process_group()


def test_errors_name_what_was_expected():
    run_ranks(errors, 2, comm=False)
