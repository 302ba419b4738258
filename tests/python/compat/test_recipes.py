"""Data parallelism of other frameworks over the backend, as docs/howto/frameworks.md writes it."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def batch(seed: int, step: int, rank: int, size: int) -> torch.Tensor:
    whole = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(seed + step))
    return whole.chunk(size)[rank]


def steps(model: Any, optimizer: Any, backward: Any, seed: int, rank: int, size: int) -> nn.Module:
    for step in range(3):
        optimizer.zero_grad()
        backward(model(batch(seed, step, rank, size)).square().mean())
        optimizer.step()
    return model


def alone(seed: int, size: int) -> list[torch.Tensor]:
    model = make(seed)
    for step in range(3):
        model.zero_grad()
        whole = torch.cat([batch(seed, step, rank, size) for rank in range(size)])
        model(whole).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return list(model.parameters())


def expect(model: nn.Module, seed: int, size: int) -> None:
    assert dist.get_backend() == "torch_overlap"
    for own, want in zip(model.parameters(), alone(seed, size), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-6)


def with_accelerate(rank: int, size: int, store: Any, seed: int) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    AcceleratorState._reset_state(reset_partial_state=True)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == size
        model = make(seed + rank)  # DDP takes those of rank 0
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        steps(model, optimizer, accelerator.backward, seed, rank, size)
        expect(accelerator.unwrap_model(model), seed, size)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate(seed: int) -> None:
    pytest.importorskip("accelerate")
    run_ranks(with_accelerate, 2, seed, comm=False, timeout=120)


def with_fabric(rank: int, size: int, store: Any, seed: int) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_RANK": "0",
                 "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                 "TORCHELASTIC_RUN_ID": "0"}  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        strategy = DDPStrategy(process_group_backend="torch_overlap", cluster_environment=TorchElasticEnvironment())
        fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()
        model = make(seed + rank)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        steps(model, optimizer, fabric.backward, seed, rank, size)
        expect(model, seed, size)


def test_lightning_fabric(seed: int) -> None:
    pytest.importorskip("lightning_fabric")
    run_ranks(with_fabric, 2, seed, comm=False, timeout=120)


def with_deepspeed(rank: int, size: int, store: Any, seed: int, folder: str) -> None:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu",
                 "TORCH_EXTENSIONS_DIR": folder}  # fmt: skip
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    with mock.patch.dict(os.environ, variables):
        import deepspeed

        for stage in range(4):  # in one process group: DeepSpeed keeps groups in global variables
            model = make(seed + rank)  # ZeRO takes that of rank 0
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config, dist_init_required=False
            )
            for step in range(3):
                engine.backward(engine(batch(seed, step, rank, size)).square().mean())
                engine.step()
            with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
                expect(model, seed, size)


def test_deepspeed(seed: int, tmp_path: Path) -> None:
    if not (importlib.util.find_spec("deepspeed") and importlib.util.find_spec("ninja")):
        pytest.skip("DeepSpeed is not installed")
    run_ranks(with_deepspeed, 2, seed, str(tmp_path), comm=False, timeout=500)  # it compiles an operator
