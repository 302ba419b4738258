"""transformers' own tensor parallelism with our styles: a saved tiny model, loaded and trained, beside one rank."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
         "pad_token_id": 0}  # fmt: skip


def train(model: Any, seed: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        tokens = torch.randint(32, (2, 9), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loaded(rank: int, size: int, store: Any, seed: int, name: str, folder: str) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    from torch_overlap.compat.hugging_face import overlapped_plan, register_parallel_styles

    _clear_sharding_prop_cache()
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **({"attention_bias": True} if name == "Llama" else {}))
    reference = kind(config).double()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    if rank == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    assert register_parallel_styles() == [f"overlap_{word}" for word in (
        "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")]  # fmt: skip
    plan = overlapped_plan(reference.tp_plan)
    assert sum(word.startswith("overlap_") for word in plan.values()) >= 4
    model = kind.from_pretrained(folder, dtype=torch.float64,
                                 distributed_config=DistributedConfig(tp_size=size, tp_plan=plan))  # fmt: skip
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, DTensor)
    assert train(model, seed) == pytest.approx(train(reference, seed), rel=1e-5)
    for key, parameter in reference.named_parameters():
        own = model.get_parameter(key)
        own = own.full_tensor() if isinstance(own, DTensor) else own
        torch.testing.assert_close(own, parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "size"), [("Llama", 2), ("Qwen3", 4), ("Phi3", 2)])
def test_a_tp_plan_of_our_styles(tmp_path: Any, seed: int, name: str, size: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers requires it for a tp_plan
    run_ranks(loaded, size, seed, name, str(tmp_path), comm=False, timeout=240)


def test_a_style_for_linears_refuses_another_module() -> None:
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")

    from torch_overlap.compat.hugging_face import register_parallel_styles

    def rank(comm: Any) -> None:
        register_parallel_styles()
        style = parallel.ALL_PARALLEL_STYLES["overlap_colwise"]
        with pytest.raises(TypeError, match=r"^tp_plan: expected an nn.Linear for a style of overlap_\*, got Identity"):
            style.install_forward(torch.nn.Identity(), None)

    run_ranks(rank, 1, backend="fake")


def copied(rank: int, size: int, store: Any, word: str) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from torch_overlap.compat.hugging_face import register_parallel_styles

    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    register_parallel_styles()
    linear = torch.nn.Linear(4, 6, bias=False)
    ALL_PARALLEL_STYLES[f"overlap_{word}"].install_forward(linear, mesh)
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        twin.weight.mul_(2)
        x = torch.randn(3, 4)
        torch.testing.assert_close(twin(x), 2 * linear(x))


@pytest.mark.parametrize("word", ["colwise", "rowwise"])
def test_a_copy_computes_with_its_own_weights(word: str) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel")
    run_ranks(copied, 2, word, comm=False)
