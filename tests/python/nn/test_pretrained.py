"""Plans for models of transformers: tiny models of several families, compared with themselves, unsharded, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama_cases import start
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_overlap.nn.styles import ColumnParallel, parallelize, plan_for
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
VOCABULARY, SEQUENCE, BATCH = 32, 12, 2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": 0}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 4}),
    "qwen3-tied": ("Qwen3", {"head_dim": 4, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8}),
    "gemma3": ("Gemma3", {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8, "layer_types":
                          ["sliding_attention", "full_attention"]}),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "phi3": ("Phi3", {}),
    "mistral": ("Mistral", {"head_dim": 4, "sliding_window": None}),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip


def make(family: str, seed: int, **changes: Any) -> Any:
    import transformers

    name, more = FAMILIES[family]
    kind = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
    config = kind(**{**SIZES, **more, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(config).double()
    for parameter in model.parameters():  # norms too
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # Norms and losses of transformers compute in fp32.
    torch.testing.assert_close(whole(got), want, rtol=1e-3, atol=1e-4)


def train(model: Any, seed: int, length: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)  # does not enlarge roundings of fp32
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(3):
        tokens = torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [loss.item(), whole(norm).item()]
    return seen


def trained(rank: int, size: int, store: Any, seed: int, family: str, sequence_parallel: bool, length: int,
            folder: str) -> None:  # fmt: skip
    import transformers

    mesh = start(rank, size, store)
    reference = make(family, seed)
    model = copy.deepcopy(reference)
    plan = plan_for(model, size, sequence_parallel=sequence_parallel, algorithm="pipelined")
    parallelize(model, mesh, plan)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    tied = reference.lm_head.weight is reference.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert train(model, seed, length) == pytest.approx(train(reference, seed, length), rel=1e-4)
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).detach(), parameter.detach())

    tokens = torch.randint(1, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed + 1))
    for keep in (0, 1, 3):
        with torch.no_grad():
            got, want = (m(tokens, logits_to_keep=keep).logits for m in (model, reference))
        close(got, want)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **options), reference.generate(tokens, **options))

    model.save_pretrained(folder)
    torch.distributed.barrier()
    saved = type(reference).from_pretrained(folder, dtype=torch.float64)
    assert set(saved.state_dict()) == set(reference.state_dict())
    for name, value in reference.state_dict().items():
        close(saved.state_dict()[name], value)
    assert transformers.AutoConfig.from_pretrained(folder).to_dict().get("distributed_config") is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sequence_parallel", "length"), [(False, SEQUENCE), (True, SEQUENCE - 1)])
def test_a_plan_trains_generates_and_saves_like_the_whole_model(
    tmp_path: Any, seed: int, family: str, sequence_parallel: bool, length: int
) -> None:
    pytest.importorskip("transformers")
    run_ranks(trained, 2, seed, family, sequence_parallel, length, str(tmp_path), comm=False, timeout=240)


def without_gathered_logits(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    reference = make("gemma3", seed)
    plan = plan_for(reference, size, gather_logits=False, algorithm="pipelined")
    model = parallelize(copy.deepcopy(reference), mesh, plan)
    assert train(model, seed, SEQUENCE - 1) == pytest.approx(train(reference, seed, SEQUENCE - 1), rel=1e-4)
    tokens = torch.arange(1, SEQUENCE).unsqueeze(0)
    labels = tokens.where(tokens % 3 != 0, -100)
    got, want = (m(tokens, labels=labels, num_items_in_batch=torch.tensor(5)) for m in (model, reference))
    close(got.loss, want.loss)
    close(got.logits, want.logits.chunk(size, -1)[rank])


def test_a_loss_without_gathered_logits(seed: int) -> None:
    pytest.importorskip("transformers")
    run_ranks(without_gathered_logits, 2, seed, comm=False, timeout=240)


def recomputed(rank: int, size: int, store: Any, seed: int, reentrant: bool, attention: str) -> None:
    mesh = start(rank, size, store)
    reference = make("qwen3", seed, attn_implementation=attention)
    model = parallelize(copy.deepcopy(reference), mesh, plan_for(reference, size, algorithm="pipelined"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    reference.train()
    assert train(model, seed, SEQUENCE - 1) == pytest.approx(train(reference, seed, SEQUENCE - 1), rel=1e-4)


@pytest.mark.parametrize(("reentrant", "attention"), [(False, "sdpa"), (True, "eager")])
def test_gradient_checkpointing(seed: int, reentrant: bool, attention: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(recomputed, 2, seed, reentrant, attention, comm=False, timeout=240)


def two_lengths(rank: int, size: int, store: Any, seed: int, reentrant: bool) -> None:
    """Layers of two odd lengths are recomputed in one backward pass."""
    mesh = start(rank, size, store)
    reference = make("llama", seed)
    model = parallelize(copy.deepcopy(reference), mesh, plan_for(reference, size, algorithm="pipelined"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    for module in (model, reference):
        module.train()
        inputs = [module.get_input_embeddings()(tokens[:, :n]) for n in (12, 11, 9)]
        sum(module(inputs_embeds=x).logits.square().mean() for x in inputs).backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lengths_of_one_backward_pass_may_differ(seed: int, reentrant: bool) -> None:
    pytest.importorskip("transformers")
    run_ranks(two_lengths, 2, seed, reentrant, comm=False, timeout=240)


def torch_styled(mesh: Any) -> nn.Module:
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})


def refused(rank: int, size: int, store: Any) -> None:
    import transformers

    mesh = start(rank, size, store)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_layer=1, n_head=6, vocab_size=32))
    with pytest.raises(TypeError, match=r"^plan_for: expected a model of transformers with a tp_plan, got GPT2LMHead"):
        plan_for(gpt2, size)
    odd = make("llama-tied-bias", 1, vocab_size=33)
    plan = plan_for(odd, size)
    assert "lm_head is replicated: 2 ranks do not divide 33" in str(plan)
    parallelize(odd, mesh, plan)
    tokens = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(IndexError):
        parallelize(make("llama", 1), mesh, plan_for(make("llama", 1), size))(tokens * VOCABULARY)
    two = make("llama", 1, num_attention_heads=2, num_key_value_heads=1, head_dim=12)
    with pytest.raises(ValueError, match=r"expected out_features divisible by 2 ranks times 12 \(multiple_of\)"):
        parallelize(two, mesh, plan_for(two, size))
    plain = parallelize(make("llama", 1), mesh, plan_for(make("llama", 1), size))
    with pytest.raises(TypeError, match=r"expected plain parameters, got 'weight' of .* Parallelize the model once"):
        parallelize(torch_styled(mesh), mesh, {"0": ColumnParallel()})
    with pytest.raises(TypeError, match=r"expected an nn.Linear, got ColumnParallelLinear; change the plan"):
        parallelize(plain, mesh, {"lm_head": ColumnParallel()})


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("name", "message"), [
    ("Apertus", r"for 'model.layers.\*.mlp.act_fn', which works beside split projections, got none for its 'alpha_p'"),
    ("Doge", r"for 'model.layers.\*.self_attn', which works beside split projections, got none for its 'A'"),
    ("Mixtral", r"for 'model.layers.\*.mlp.experts', which works beside split projections, got none for its 'gate_up_"),
    ("FalconH1", r"expected modules of FalconH1ForCausalLM that the rules of its tp_plan name|one list of layers"),
])  # fmt: skip
def test_pretrained_families_that_no_plan_serves(name: str, message: str, sequence_parallel: bool) -> None:
    transformers = pytest.importorskip("transformers")
    more = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 8} if name == "FalconH1" else {}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **more))
    with pytest.raises(ValueError, match=message):
        plan_for(model, 2, sequence_parallel=sequence_parallel)


def test_what_cannot_be_planned_is_refused() -> None:
    pytest.importorskip("transformers")
    run_ranks(refused, 2, comm=False, timeout=240)
