"""The layers combined with torch's data parallelism: DDP and FSDP2 over another axis."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_overlap as to
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


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_data_parallelism_over_another_axis(how, seed):
    run_ranks(check_data_parallel, 4, seed, how, comm=False)
