"""DeviceMesh: torch's own init_device_mesh on the backend, and ours over communicators."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_overlap
from torch_overlap.device_mesh import init_device_mesh
from torch_overlap.testing import run_ranks


def gathers(mesh, rank):
    """A DTensor is resharded through the mesh: sharded on every dimension, then whole again."""
    whole = torch.arange(8.0 * 8).reshape(8, 8)
    placements = [Shard(d) for d in range(mesh.ndim)]
    tensor = dist.tensor.distribute_tensor(whole, mesh, placements)
    assert isinstance(tensor, DTensor)
    assert torch.equal(tensor.redistribute(placements=[Replicate()] * mesh.ndim).to_local(), whole)
    assert torch.equal((tensor + 1).sum().full_tensor(), (whole + 1).sum())


def stock_mesh(rank, size, store):
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_group().name() in ("custom", "torch_overlap")
    assert dist.get_backend(mesh["tp"].get_group()) == "torch_overlap"
    gathers(mesh, rank)
    flat = mesh._flatten("all")
    gathers(flat, rank)
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=mesh.get_group("dp"))
    assert x[0].item() == 2 * (rank % 2) + 2


def test_init_device_mesh_of_torch():
    run_ranks(stock_mesh, 4, comm=False)


def mesh_1d(comm):
    mesh = init_device_mesh([comm], ["dp"])
    assert (mesh.size(), mesh.ndim, mesh.mesh_dim_names) == (comm.get_size(), 1, ("dp",))
    assert mesh.get_local_rank("dp") == comm.get_rank() == dist.get_rank()
    assert dist.get_backend_config() == "cpu:torch_overlap"
    gathers(mesh, comm.get_rank())
    assert mesh.get_group() is dist.group.WORLD
    again = init_device_mesh([comm], ["x"])
    assert again.get_group() is mesh.get_group()
    other = init_device_mesh([comm.split(list(range(comm.get_size())), name="other")], ["dp"])
    assert other.get_group("dp") is not mesh.get_group("dp")
    assert other.get_group("dp").group_desc == "mesh_dp"
    gathers(other, comm.get_rank())
    everybody = dist.new_group()  # the communicator's store serves new groups
    x = torch.ones(2)
    dist.all_reduce(x, group=everybody)
    assert x.tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    assert comm.is_finalized()
    assert not dist.is_initialized()


def test_mesh_over_one_communicator():
    run_ranks(mesh_1d, 2)


# Names that no other test uses: DTensor caches decisions by the properties of a mesh, and with them the process groups,
# which would have been destroyed by then.
def mesh_2d(comm):
    rank = comm.get_rank()
    dp = comm.split([rank % 2, rank % 2 + 2], name=f"dp{rank % 2}")
    tp = comm.split([rank // 2 * 2, rank // 2 * 2 + 1], name=f"tp{rank // 2}")
    with pytest.raises(torch_overlap.InvalidValueError, match="_global_comm"):
        init_device_mesh([dp, tp], ["outer", "inner"])
    with pytest.raises(torch_overlap.InvalidValueError, match="one name"):
        init_device_mesh([dp, tp], ["dp", "dp"], _global_comm=comm)
    with pytest.raises(torch_overlap.InvalidValueError, match="product"):
        init_device_mesh([dp], ["dp"], _global_comm=comm)
    if rank in (1, 2):
        with pytest.raises(torch_overlap.InvalidValueError, match="outermost"):
            init_device_mesh([tp, dp], ["inner", "outer"], _global_comm=comm)
    assert not dist.is_initialized()
    mesh = init_device_mesh([dp, tp], ["outer", "inner"], _global_comm=comm)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_coordinate() == [rank // 2, rank % 2] or mesh.get_coordinate() == (rank // 2, rank % 2)
    assert dist.get_process_group_ranks(mesh.get_group("inner")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(mesh.get_group("outer")) == [rank % 2, rank % 2 + 2]
    assert [mesh.get_group(name).group_desc for name in ("outer", "inner")] == ["mesh_outer", "mesh_inner"]
    assert dist.group.WORLD.group_desc == "default_pg"
    gathers(mesh, rank)
    gathers(mesh["outer"], rank)
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=rank // 2 * 2 + 1, group=mesh.get_group("inner"))
    assert x[0].item() == rank // 2 * 2 + 1
    dist.destroy_process_group()
    assert all(c.is_finalized() for c in (comm, dp, tp))


def test_mesh_over_split_communicators():
    run_ranks(mesh_2d, 4)


def test_module_is_importable_by_name():
    assert torch_overlap.device_mesh.init_device_mesh is init_device_mesh
