"""LoRA of PEFT before and after a plan: tiny models compared with themselves, unsharded, in fp64."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cases import start
from test_pretrained import BATCH, SEQUENCE, VOCABULARY, close, make, whole
from torch import nn
from torch.distributed.tensor import DTensor

import torch_overlap as to
from torch_overlap.nn.styles import parallelize, parallelize_adapters, plan_for
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "head_dim": 8}


def with_lora(model: Any, seed: int, dropout: float, get_peft_model: Any = None, **options: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout, init_lora_weights=False, use_rslora=True,
                             task_type="CAUSAL_LM", **{"target_modules": "all-linear", **options})  # fmt: skip
    torch.manual_seed(seed)
    return (get_peft_model or peft.get_peft_model)(model, config)


def train(model: Any, seed: int, length: int) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    torch.manual_seed(seed)  # dropout
    generator, seen = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        tokens = torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seen += [loss.item(), whole(norm).item()]
    return seen


def same_files(folder: Path, reference: Path) -> None:
    from safetensors.torch import load_file

    assert {p.name for p in folder.iterdir()} == {p.name for p in reference.iterdir()}
    for path in reference.iterdir():
        if path.suffix == ".safetensors":
            got, want = load_file(folder / path.name), load_file(path)
            # PEFT copies the whole head, which is not trained, to the adapter if it is an nn.Linear.
            want = {key: value for key, value in want.items() if ".base_layer." not in key}
            assert set(got) ^ set(want) == set()
            for key, value in want.items():
                close(got[key], value)
        elif path.suffix == ".json":
            got, want = json.loads((folder / path.name).read_text()), json.loads(path.read_text())
            for config in (got, want):
                config.get("target_modules", []).sort()
            assert got == want


def trained(rank: int, size: int, store: Any, seed: int, when: str, family: str, sequence_parallel: bool,
            dropout: float, folder: str) -> None:  # fmt: skip
    from torch_overlap.compat import peft as compat

    mesh = start(rank, size, store)
    base = make(family, seed, **(HEADS if size == 4 else {}))
    targets = {"target_modules": ["q_proj", "down_proj", "lm_head"]} if family == "llama" else {}
    targets |= {"lora_bias": True} if "bias" in family else {}
    reference = with_lora(copy.deepcopy(base), seed, dropout, **targets)
    if when == "before":
        model = with_lora(base, seed, dropout, **targets)
        plan = plan_for(model, size, sequence_parallel=sequence_parallel)
        assert all(name.startswith("base_model.model.") for name in plan)
        parallelize(model, mesh, plan)
    else:
        parallelize(base, mesh, plan_for(base, size, sequence_parallel=sequence_parallel))
        model = with_lora(base, seed + rank, dropout, compat.get_peft_model, **targets)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    same_parameters(model, reference)
    length = SEQUENCE - 1 if sequence_parallel else SEQUENCE
    assert train(model, seed, length) == pytest.approx(train(reference, seed, length), rel=1e-4)
    same_parameters(model, reference)

    tokens = torch.randint(1, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed + 1))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for m in (model, reference):
        m.eval()
    assert torch.equal(model.generate(input_ids=tokens, **options), reference.generate(input_ids=tokens, **options))
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():
        close(model(input_ids=tokens).logits, reference(input_ids=tokens).logits)

    own, other = Path(folder) / "own", Path(folder) / "reference"
    model.save_pretrained(own / "adapter", is_main_process=rank == 0)
    merged, want = model.merge_and_unload(), reference.merge_and_unload()
    assert all(isinstance(p, DTensor) for p in merged.parameters())
    with torch.no_grad():
        close(merged(tokens).logits, want(tokens).logits)
    merged.save_pretrained(own / "merged")
    if rank == 0:
        with_reference = with_lora(make(family, seed, **(HEADS if size == 4 else {})), seed, dropout, **targets)
        train(with_reference, seed, length)
        with_reference.save_pretrained(other / "adapter")
        want.save_pretrained(other / "merged")
        same_files(own / "adapter", other / "adapter")
        same_files(own / "merged", other / "merged")


def same_parameters(model: nn.Module, reference: nn.Module) -> None:
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        own = model.get_parameter(name)
        assert own.requires_grad == parameter.requires_grad
        close(own.detach(), parameter.detach())


@pytest.mark.parametrize(("when", "family", "size", "sequence_parallel", "dropout"), [
    ("before", "qwen3-tied", 2, True, 0.3),
    ("before", "phi3", 2, False, 0.3),
    ("before", "llama", 4, False, 0.0),
    ("after", "phi3", 2, True, 0.3),
    ("after", "llama-tied-bias", 4, True, 0.0),
])  # fmt: skip
def test_lora_trains_merges_and_saves_like_the_whole_model(
    tmp_path: Any, seed: int, when: str, family: str, size: int, sequence_parallel: bool, dropout: float
) -> None:
    pytest.importorskip("peft")
    run_ranks(trained, size, seed, when, family, sequence_parallel, dropout, str(tmp_path), comm=False, timeout=300)


def added_later(rank: int, size: int, store: Any, seed: int) -> None:
    import peft

    mesh = start(rank, size, store)
    base = make("llama", seed)
    model = with_lora(base, seed, 0.0)
    parallelize(model, mesh, plan_for(model, size))
    tokens = torch.ones(1, 5, dtype=torch.int64)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False))
    message = r"^forward: expected all parameters of .* as DTensors, got '.*lora_A.second.weight' as a plain tensor. It"
    with pytest.raises(to.StateError, match=message):
        model(input_ids=tokens)
    parallelize_adapters(model)
    model.set_adapter("second")
    model(input_ids=tokens).logits.square().sum().backward()
    own = model.get_parameter("base_model.model.model.layers.0.self_attn.o_proj.lora_A.second.weight")
    assert own.grad.full_tensor().shape == (2, 24)
    assert own.grad.full_tensor().ne(0).all()

    plain = parallelize(make("llama", seed), mesh, plan_for(make("llama", seed), size))
    plain.score = nn.Linear(2, 2)
    with pytest.raises(to.StateError, match=r"got 'score.weight' as a plain tensor"):
        plain(tokens)
    parallelize(plain.score, mesh, {})
    plain(tokens)
    with pytest.raises(to.StateError, match=r"^resize_token_embeddings: expected a model of whole tensors, got one"):
        plain.resize_token_embeddings(VOCABULARY + 2)


def test_parameters_that_are_added_later_are_split_or_refused(seed: int) -> None:
    pytest.importorskip("peft")
    run_ranks(added_later, 2, seed, comm=False, timeout=240)


def refused(rank: int, size: int, store: Any, seed: int) -> None:
    import peft

    from torch_overlap.compat import peft as compat

    mesh = start(rank, size, store)
    cases = [
        ({"target_modules": ["q_proj"], "use_dora": True}, r"LoRA at 'model.layers.0.self_attn.q_proj', got Dora"),
        ({"target_modules": ["embed_tokens"]}, r"got Embedding at 'model.embed_tokens'"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"got ModulesToSaveWrapper at 'lm_head'"),
    ]
    for options, message in cases:
        model = with_lora(make("llama", seed), seed, 0.0, **options)
        with pytest.raises(ValueError, match=message):
            plan_for(model, size)
    prompt = peft.get_peft_model(make("llama", seed), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"expected LoRA as the adapter of the model, got prompt learning"):
        parallelize(prompt, mesh, {})
    split = parallelize(make("llama", seed), mesh, plan_for(make("llama", seed), size))
    with pytest.raises(ValueError, match=r"^get_peft_model: expected init_lora_weights of .*, got 'pissa'. Add the"):
        compat.get_peft_model(split, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))

    # Ranks that drop different elements of a replicated input.
    model = with_lora(make("llama", seed), seed, 0.5)
    parallelize(model, mesh, plan_for(model, size, sequence_parallel=False))
    torch.manual_seed(seed + rank)
    tokens = torch.ones(1, 6, dtype=torch.int64)
    with pytest.raises(to.StateError, match=r"expected the same gradient of 'weight' of Linear .* seed it alike"):
        model(input_ids=tokens).logits.square().sum().backward()


def test_adapters_that_would_be_wrong_are_refused(seed: int) -> None:
    pytest.importorskip("peft")
    run_ranks(refused, 2, seed, comm=False, timeout=240)
