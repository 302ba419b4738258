"""The layers combined with torch's data parallelism: DDP and FSDP2 over another axis."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from llama_cases import start as mesh_of
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_overlap as to
from torch_overlap.nn.styles import ColumnParallel, RowParallel, parallelize
from torch_overlap.testing import run_ranks

ROWS, FEATURES, HIDDEN = 4, 8, 16


def start(rank, size, store, shape):
    """Returns a mesh of torch, and the communicator of its axis "tp"."""
    limit = timedelta(seconds=60)
    dist.init_process_group("torch_overlap", store=dist.PrefixStore("pg", store), rank=rank, world_size=size,
                            timeout=limit)  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    world = to.new_comm("gloo", "cpu", "world", store=dist.PrefixStore("c", store), rank=rank, size=size,
                        timeout=limit)  # fmt: skip
    tp = world.split(mesh["tp"].mesh.tolist(), "tp")
    return mesh, world, tp


def stop(world, tp):
    tp.finalize()
    world.finalize()
    dist.destroy_process_group()


def check_data_parallel(rank, size, store, seed, how):
    mesh, world, tp = start(rank, size, store, (2, 2))
    torch.manual_seed(seed)  # the same on all ranks
    layer = to.nn.ParallelMLP(FEATURES, HIDDEN, tp, dtype=torch.float64)
    whole = to.nn.full_state_dict(layer)
    batches = torch.randn(2, ROWS, 1, FEATURES, dtype=torch.float64)
    x = batches[mesh.get_local_rank("dp")].chunk(2)[mesh.get_local_rank("tp")]
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(layer, process_group=mesh.get_group("dp"))
    elif how == "replicate":
        model = replicate(layer, process_group=mesh.get_group("dp"))
    else:
        model = fully_shard(layer, mesh=mesh["dp"])
    model(x).square().sum().backward()
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    grads = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}

    reference = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)).double()
    names = {"up.weight0": "0.weight", "up.bias0": "0.bias", "down.weight": "2.weight", "down.bias": "2.bias"}
    reference.load_state_dict({names[name]: value for name, value in whole.items()})
    (reference(batches).square().sum() / 2).backward()  # data parallelism averages
    split = {"up.weight0": 0, "up.bias0": 0, "down.weight": 1}
    for name, other in names.items():
        expected = reference.get_parameter(other).grad
        if name in split:
            expected = expected.chunk(2, split[name])[tp.get_rank()]
        torch.testing.assert_close(grads[name], expected)
    stop(world, tp)


@pytest.mark.parametrize("how", ["ddp", "replicate", "fsdp2"])
def test_data_parallelism_over_another_axis(how, seed):
    run_ranks(check_data_parallel, 4, seed, how, comm=False)


def plan_over(mesh):
    """Returns a model of linears and a norm, the same on all ranks, and its copy under a plan over mesh["tp"]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)).double()
    plan = {"1": ColumnParallel(sequence_parallel=False), "2": RowParallel(sequence_parallel=False)}
    return model, parallelize(copy.deepcopy(model), mesh["tp"], plan)


def check_replicas(rank, size, store, seed):
    mesh = mesh_of(rank, size, store, (2, 1, 2), ("replicas", "shards", "tp"))
    reference, model = plan_over(mesh)
    fully_shard(model, mesh=mesh["replicas", "shards"])
    batches = torch.randn(2, ROWS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model(batches[mesh.get_local_rank("replicas")]).square().sum().backward()
    (reference(batches).square().sum() / 2).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    dist.destroy_process_group()


def test_replicas_of_a_plan_are_a_mesh_of_one_shard(seed):
    """In place of DDP, which does not take DTensors."""
    run_ranks(check_replicas, 4, seed, comm=False)


def check_refused(rank, size, store):
    mesh = mesh_of(rank, size, store, (1, 2), ("dp", "tp"))
    x = torch.ones(ROWS, FEATURES, dtype=torch.float64)
    for tp in (mesh["tp"], mesh["dp", "tp"]):
        with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
            fully_shard(plan_over(mesh)[1], mesh=tp)
    with pytest.raises(TypeError, match="Invariant encountered: value was None"):
        fully_shard(plan_over(mesh)[1])
    dp = mesh.get_group("dp")
    with pytest.raises(RuntimeError, match="Attempted to flatten multiple dimensions"):
        nn.parallel.DistributedDataParallel(plan_over(mesh)[1], process_group=dp)
    advice = "fully_shard over another axis of the mesh"
    for wrap in (replicate, nn.parallel.DistributedDataParallel):
        with pytest.raises(to.StateError, match=advice):
            wrap(plan_over(mesh)[1], device_mesh=mesh["dp"])(x)
    with pytest.raises(to.StateError, match=advice):
        replicate(plan_over(mesh)[1], process_group=dp)(x)
    # torch compiles as for the model whose forward pass raised, until another one has passed.
    replicate(nn.Linear(FEATURES, 1, dtype=torch.float64), process_group=dp)(x)
    dist.destroy_process_group()


def test_data_parallelism_that_does_not_take_a_plan():
    """The texts that docs/explanation/modules.md names; those of torch come before any code of the layers runs."""
    run_ranks(check_refused, 2, comm=False)
