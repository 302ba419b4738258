"""Schedules of torch.distributed.pipelining: stages train like the whole model, in fp64."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from torch_overlap.testing import run_ranks

FEATURES, BATCH, MICROBATCHES = 6, 12, 6
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble",)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def own_stages(schedule: str, rank: int, size: int) -> list[int]:
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else [rank, rank + size]


def train(rank: int, size: int, store: Any, seed: int, name: str) -> None:
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(seed)
    own = own_stages(name, rank, size)
    count = size * len(own)
    whole = nn.Sequential(*(Part() for _ in range(count))).double()
    parts = [copy.deepcopy(whole[i]) for i in own]
    x, target = torch.randn(2, BATCH, FEATURES, dtype=torch.float64)
    stages = [PipelineStage(part, i, count, torch.device("cpu")) for part, i in zip(parts, own, strict=True)]
    schedule = getattr(pipelining, name)(stages[0] if name in SINGLE else stages, MICROBATCHES,
                                         loss_fn=nn.functional.mse_loss)  # fmt: skip
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (whole, nn.ModuleList(parts))]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(x), target)
        loss.backward()
        losses: list[torch.Tensor] = []
        has_last = count - 1 in own
        out = schedule.step(*([x] if 0 in own else []),
                            **({"target": target, "losses": losses} if has_last else {}))  # fmt: skip
        if has_last:
            torch.testing.assert_close(out, whole(x))
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        for optimizer in optimizers:
            optimizer.step()
        for i, part in zip(own, parts, strict=True):
            for got, want in zip(part.parameters(), whole[i].parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "size"), [*((s, 3) for s in SINGLE), *((s, 2) for s in LOOPED + V_SHAPED), (LOOPED[1], 3)]
)
def test_schedules_train_like_the_whole_model(seed: int, schedule: str, size: int) -> None:
    run_ranks(train, size, seed, schedule, comm=False, timeout=120)
