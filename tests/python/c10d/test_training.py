"""DDP, FSDP2 and tensor parallelism on the backend: after 20 steps the weights are those of the stock gloo backend."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_overlap.testing import gpu_of, run_ranks

STEPS = 20


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model(device="cpu"):
    torch.manual_seed(1234)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4)).to(device)


def train(model, rank, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # DTensors and tensors are mixed
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 16, generator=generator).to(device)
        loss = (model(x) - x[:, :4].tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full(parameter):
    value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return value.detach().clone()


def ddp(rank, size, device):
    # A small bucket: several reductions are in flight in a backward.
    model = nn.parallel.DistributedDataParallel(make_model(device), bucket_cap_mb=0.01)
    train(model, rank, device)
    return model.module


def ddp_bf16_hook(rank, size, device):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = nn.parallel.DistributedDataParallel(make_model(device))
    model.register_comm_hook(None, bf16_compress_hook)
    train(model, rank, device)
    return model.module


def fsdp(rank, size, device):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device, (size,))
    model = make_model(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, device)
    return model


def tensor_parallel(rank, size, device):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(device, (size,), mesh_dim_names=("tp",))
    model = make_model(device)
    for block in list(model)[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, 0, device)  # all ranks see the same batch
    return model


RECIPES = {"ddp": ddp, "ddp_bf16_hook": ddp_bf16_hook, "fsdp": fsdp, "tensor_parallel": tensor_parallel}


def weights(rank, size, store, recipe, device, stock):
    """Returns the weights that each backend trains, one after the other in the same processes."""
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank))
    trained = {}
    for backend in (stock, "torch_overlap"):
        dist.init_process_group(
            backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        model = RECIPES[recipe](rank, size, device)
        trained[backend] = [full(p).cpu() for p in model.parameters()]
        dist.destroy_process_group()
    return trained


def compare(recipe, device, stock):
    size = 2
    before = [p.detach() for p in make_model().parameters()]
    for trained in run_ranks(weights, size, recipe, device, stock, comm=False, timeout=240):
        for start, ours, theirs in zip(before, trained["torch_overlap"], trained[stock], strict=True):
            assert not torch.equal(start, theirs)
            if "hook" in recipe:
                torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
            else:
                # Two ranks: a sum of two terms has one order, so even the bits agree.
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_training_matches_gloo(recipe):
    compare(recipe, "cpu", "gloo")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_training_matches_nccl(recipe):
    compare(recipe, "cuda", "nccl")
