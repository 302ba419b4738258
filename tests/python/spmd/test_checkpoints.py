"""torch.distributed.checkpoint of shard_module's state: saved on one mesh, loaded on others, and without one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import torch_overlap as to
from torch_overlap import InvalidTypeError, InvalidValueError, UnsupportedError
from torch_overlap.mesh import (
    P,
    auto_shard,
    connect,
    full_state_dict,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    mesh_of,
    shard,
    shard_module,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

DIM, HIDDEN, VOCABULARY = 6, 10, 9
ALONG_TP = {"up.weight": P("tp"), "up.bias": P("tp"), "down.weight": P(None, "tp"), "embedding.weight": P("tp")}
# axes -> layouts; parts of 10, 9 and 6 are uneven on 4 ranks, and 9 on 2
MESHES = {
    "tp=2": ({"tp": 2}, ALONG_TP),
    "tp=4": ({"tp": 4}, ALONG_TP),
    "dp=2,tp=2": ({"dp": 2, "tp": 2}, ALONG_TP | {"up.weight": P("dp", "tp"), "embedding.weight": P(("dp", "tp"))}),
    "tp=1": ({"tp": 1}, ALONG_TP),
    "chosen": ({"dp": 2, "tp": 2}, None),
}


class Model(nn.Module):
    """Tied weights, a buffer, and one that is not saved."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


def start(rank, size, store, axes):
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=size,
                            timeout=timedelta(seconds=60))  # fmt: skip
    comm = to.new_comm("gloo", "cpu", "world", store=dist.PrefixStore("c", store), rank=rank, size=size)
    devices = dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return devices, connect(mesh_of(devices), comm), comm


def stop(mesh, comm):
    mesh.close()
    comm.finalize()
    dist.destroy_process_group()


def sharded(seed, mesh, layouts):
    model = Model(seed)
    if layouts is None:
        known = {"x": P("dp"), "up.weight": P("tp"), "down.weight": P("dp", "tp")}
        choice = auto_shard(Model(seed), mesh.mesh, (torch.zeros(512, DIM),), layouts=known, training=True)
        layouts = {name: layout for name, layout in choice.layouts.items() if name in model.state_dict()}
    return shard_module(model, mesh, layouts)


def save(rank, size, store, seed, folder, where):
    axes, layouts = MESHES[where]
    devices, mesh, comm = start(rank, size, store, axes)
    model = sharded(seed, mesh, layouts)
    dcp.save(sharded_state_dict(model, devices), checkpoint_id=folder)
    stop(mesh, comm)


def load(rank, size, store, seed, folder, where):
    axes, layouts = MESHES[where]
    devices, mesh, comm = start(rank, size, store, axes)
    model = sharded(seed + 1, mesh, layouts)
    state = sharded_state_dict(model, devices)
    assert list(state) == list(model.state_dict())
    dcp.load(state, checkpoint_id=folder)
    loaded = {name: value.clone() for name, value in state.items()}
    for value in state.values():  # the state shares the memory of the parameters
        value.to_local().zero_()
    assert all(not value.any() for value in model.state_dict().values())
    assert str(load_sharded_state_dict(model, loaded)) == "<All keys matched successfully>"
    full = full_state_dict(model)
    for name, value in Model(seed).state_dict().items():
        assert torch.equal(full[name], value), name
    stop(mesh, comm)


@pytest.mark.parametrize("first", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("then", MESHES)
def test_a_checkpoint_of_one_mesh_loads_on_another(tmp_path, seed, first, then):
    folder, ranks = str(tmp_path), {"tp=1": 1, "tp=2": 2}
    run_ranks(save, ranks.get(first, 4), seed, folder, first, comm=False)
    run_ranks(load, ranks.get(then, 4), seed, folder, then, comm=False)


def test_the_module_that_is_not_sharded_loads_it(tmp_path, seed):
    run_ranks(save, 4, seed, str(tmp_path), "chosen", comm=False)
    model, wanted = Model(seed + 1), Model(seed).state_dict()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


def train(model, mesh, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = shard(torch.randn(8, DIM, generator=generator, dtype=torch.float64), mesh)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_states(model, optimizer, devices):
    state = sharded_optimizer_state_dict(model, optimizer, devices)["state"]
    whole = {f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
             for name, values in state.items() for key, value in values.items()}  # fmt: skip
    return whole | full_state_dict(model)


def trained(rank, size, store, seed, folder, where, saved=None):
    axes, layouts = MESHES[where]
    devices, mesh, comm = start(rank, size, store, axes)
    model = shard_module(Model(seed + (saved is not None)).double(), mesh, layouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if saved else 0.02)
    if saved is None:
        train(model, mesh, optimizer, 3, seed)
    state = {"model": sharded_state_dict(model, devices),
             "optimizer": sharded_optimizer_state_dict(model, optimizer, devices)}  # fmt: skip
    if saved is None:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        load_sharded_state_dict(model, state["model"])
        load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.02
    states = [whole_states(model, optimizer, devices)]
    train(model, mesh, optimizer, 2, seed + 1)
    states.append(whole_states(model, optimizer, devices))
    if saved is not None:
        assert set(states[0]) == set(saved[0])
        for name, value in saved[0].items():
            assert torch.equal(states[0][name], value), name
        for name, value in saved[1].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-8, atol=1e-8)
    stop(mesh, comm)
    return states


@pytest.mark.parametrize(("first", "then"), [("tp=2", "tp=4"), ("dp=2,tp=2", "tp=1"), ("tp=1", "dp=2,tp=2")])
def test_training_goes_on_on_another_mesh(tmp_path, seed, first, then):
    """The states of the optimizer are those of the first mesh, and so are the steps after it."""
    folder, ranks = str(tmp_path), {"tp=1": 1, "tp=2": 2}
    saved = run_ranks(trained, ranks.get(first, 4), seed, folder, first, comm=False)[0]
    assert saved[0]["up.weight.exp_avg"].shape == (HIDDEN, DIM)
    assert saved[0]["embedding.weight.exp_avg"].any()
    run_ranks(trained, ranks.get(then, 4), seed, folder, then, saved, comm=False)


def errors(rank, size, store):
    devices, mesh, comm = start(rank, size, store, {"dp": 2, "tp": 2})
    model = shard_module(Model(0), mesh, ALONG_TP)
    state = sharded_state_dict(model, devices)
    with pytest.raises(InvalidValueError, match=r"expected a DeviceMesh of shape \(2, 2\).*, got \(2,\)"):
        sharded_state_dict(model, devices["tp"])
    with pytest.raises(InvalidTypeError, match=r"expected a DTensor for 'up.weight', got Tensor; load into"):
        load_sharded_state_dict(model, state | {"up.weight": torch.zeros(HIDDEN, DIM)})
    other = DTensor.from_local(torch.zeros(3, DIM), devices, [Shard(0), Shard(0)], run_check=False)
    with pytest.raises(InvalidValueError, match=r"expected \(\(10, 6\), \(Replicate\(\), Shard\(dim=0\)\)\) for "
                                                r"'up.weight', got \(\(12, 6\), "):  # fmt: skip
        load_sharded_state_dict(model, state | {"up.weight": other})
    with pytest.raises(RuntimeError, match="Missing key"):
        load_sharded_state_dict(model, {"scale": state["scale"]})
    turned = shard_module(Model(0), mesh, {"up.weight": P(("tp", "dp"))})
    with pytest.raises(UnsupportedError, match="expected the axes of dimension 0 in the order of the mesh"):
        sharded_state_dict(turned, devices)
    stop(mesh, comm)


def test_errors_name_what_was_expected():
    run_ranks(errors, 4, comm=False)
