"""Plans for models of transformers whose layers differ, or have more than attention, MLP and norms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama_cases import start
from test_pretrained import SIZES, VOCABULARY, close, make, whole
from torch import Tensor, nn

from torch_overlap import StateError
from torch_overlap.nn.styles import parallelize, plan_for
from torch_overlap.testing import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)


class Mixer(nn.Module):
    """Sees the tokens before: a causal convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(SIZES["hidden_size"], SIZES["hidden_size"], 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)


def with_mixer(seed: int, layer: int, mixer: nn.Module) -> Any:
    """Returns a Llama of which one layer passes its norm's result through a mixer, which is a child of the layer."""
    model = make("llama", seed)
    owner = model.model.layers[layer]
    owner.mixer = mixer.double()
    owner.input_layernorm.register_forward_hook(lambda _, args, y: owner.mixer(y))
    return model


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_what_may_mix_the_rows_of_any_layer_is_refused(layer: int, nested: bool) -> None:
    mixer: nn.Module = Mixer() if nested else nn.Conv1d(SIZES["hidden_size"], SIZES["hidden_size"], 1)
    model = with_mixer(0, layer, mixer)
    name = r"mixer\.conv" if nested else "mixer"
    with pytest.raises(ValueError, match=rf"expected a rule for '{name}' \(Conv1d\) of the layers of LlamaForCausalLM"):
        plan_for(model, 2)
    for parameter in model.parameters():  # as for inference, or under LoRA
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="expected a rule for"):
        plan_for(model, 2)
    assert plan_for(model, 2, sequence_parallel=False)


def test_a_parameter_in_the_attention_of_a_later_layer_is_refused() -> None:
    model = make("llama", 0)
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(6))
    for sequence_parallel in (False, True):
        with pytest.raises(ValueError, match=r"expected a rule in the tp_plan .* got none for its 'sinks'"):
            plan_for(model, 2, sequence_parallel=sequence_parallel)


def test_a_masked_loss_needs_gathered_logits() -> None:
    import transformers

    if not hasattr(transformers, "EuroBertForMaskedLM"):
        pytest.skip("transformers without EuroBert")
    model = transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**{**SIZES, "num_key_value_heads": 6}))
    assert plan_for(model, 2)
    with pytest.raises(ValueError, match=r"to have the loss ForCausalLMLoss .* got ForMaskedLMLoss. Use gather_logits"):
        plan_for(model, 2, gather_logits=False)


def base_model(rank: int, size: int, store: Any, seed: int) -> None:
    """The model without a head."""
    mesh = start(rank, size, store)
    reference = make("llama", seed).model
    model = copy.deepcopy(reference)
    parallelize(model, mesh, plan_for(model, size))
    tokens = torch.randint(1, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(seed))
    got, want = model(tokens).last_hidden_state, reference(tokens).last_hidden_state
    close(got, want)
    (got**2).sum().backward()
    (want**2).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        close(a.grad, b.grad)


def test_a_base_model(seed: int) -> None:
    run_ranks(base_model, 2, seed, comm=False, timeout=240)


KINDS = ["sliding_attention", "full_attention"]


def shared_keys(rank: int, size: int, store: Any, seed: int, options: dict[str, Any], sequence_parallel: bool) -> None:
    """Layers that lack projections, since they take keys or values from elsewhere."""
    import transformers

    mesh = start(rank, size, store)
    base = {**SIZES, "head_dim": 4, "global_head_dim": 8, "sliding_window": 4, "hidden_size_per_layer_input": 0}
    torch.manual_seed(seed)
    reference = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**base, **options})).double()
    model = copy.deepcopy(reference)
    parallelize(model, mesh, plan_for(model, size, sequence_parallel=sequence_parallel))
    tokens = torch.randint(1, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(seed))
    got, want = model(tokens, labels=tokens), reference(tokens, labels=tokens)
    close(got.logits, want.logits)
    got.loss.backward()
    want.loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            close(whole(a.grad), b.grad)


@pytest.mark.parametrize(("options", "sequence_parallel"), [
    ({"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": KINDS * 2, "hidden_size_per_layer_input": 8,
      "vocab_size_per_layer_input": VOCABULARY}, False),
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 2, "layer_types": KINDS}, False),
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 2, "layer_types": KINDS}, True),
], ids=["kv_shared", "k_eq_v", "k_eq_v-rows"])  # fmt: skip
def test_layers_that_share_keys(seed: int, options: dict[str, Any], sequence_parallel: bool) -> None:
    import transformers

    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("transformers without Gemma 4")
    run_ranks(shared_keys, 2, seed, options, sequence_parallel, comm=False, timeout=240)


def other_tokens(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    model = make("llama", seed)
    parallelize(model, mesh, plan_for(model, size))
    for tokens in (torch.full((1, 6), 3 + rank), torch.arange(1, 7 + rank)[None]):
        with pytest.raises(StateError, match="forward: expected the same tokens on all 2 ranks"):
            model(tokens)
    model(torch.arange(1, 7)[None])


def test_other_tokens_on_one_rank_are_an_error_everywhere(seed: int) -> None:
    run_ranks(other_tokens, 2, seed, comm=False, timeout=120)


def attention_of_torch(rank: int, size: int, store: Any, seed: int) -> None:
    """Its forward reads the parameters of a child."""
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)}).double()
    model = copy.deepcopy(reference)
    parallelize(model, mesh, {})
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got, want = (m["attention"](x, x, x, need_weights=False)[0] for m in (model, reference))
    close(got, want)
    got.sum().backward()
    want.sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        close(a.grad, b.grad)


def test_replicated_attention_of_torch(seed: int) -> None:
    run_ranks(attention_of_torch, 2, seed, comm=False, timeout=120)
