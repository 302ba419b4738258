"""A training loop as in Hugging Face scripts: a plan, clipping, accumulation, checkpoints, and resuming on another
number of ranks; beside the same loop on one rank without torch_overlap's styles."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torch_overlap.nn.styles import parallelize, plan_for
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
         "tie_word_embeddings": True}  # fmt: skip


def make(seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def loop(model: Any, steps: range, seed: int, folder: Path | None, resume: bool) -> list[float]:
    """Returns the loss and the norm of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if resume:
        assert folder is not None
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=folder / "optimizer")
        set_optimizer_state_dict(model, optimizer, state)
        schedule.load_state_dict(torch.load(folder / "schedule.pt"))
    seen = []
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for part in range(2):
            generator = torch.Generator().manual_seed(seed + 10 * step + part)
            tokens = torch.randint(1, 32, (2, 9), generator=generator)
            loss = model(tokens, labels=tokens).loss / 2
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        seen += [total, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()]
    if folder is not None and not resume:
        model.save_pretrained(folder / "model")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer")
        if dist.get_rank() == 0:
            torch.save(schedule.state_dict(), folder / "schedule.pt")
    return seen


def parallel(rank: int, size: int, store: Any, seed: int, folder: str, resume: bool) -> list[float]:
    import transformers

    _clear_sharding_prop_cache()
    # Rank 0 waits while others import transformers, some of them for the first time.
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    path = Path(folder)
    model = (transformers.AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float64) if resume
             else make(seed))  # fmt: skip
    parallelize(model, mesh["tp"], plan_for(model, size, gather_logits=False))
    return loop(model, range(2, 4) if resume else range(2), seed, path, resume)


def test_a_loop_is_saved_and_resumed_on_other_ranks(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("transformers")
    want = loop(make(seed), range(4), seed, None, False)
    first = run_ranks(parallel, 2, seed, str(tmp_path), False, comm=False, timeout=240)
    then = run_ranks(parallel, 4, seed, str(tmp_path), True, comm=False, timeout=240)
    assert all(values == pytest.approx(first[0], rel=1e-12) for values in first)
    assert first[0] + then[0] == pytest.approx(want, rel=1e-4)
