"""Weights of a Llama by the names that transformers gives them: random ones, or those of a saved model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_overlap.mesh.models import PRESETS, Transformer

TINY = Transformer("tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, vocabulary=256)
SHAPES = {"tiny": TINY, **{name: PRESETS[name] for name in ("llama3-8b", "llama3-70b")}}
LAYER = "model.layers.{}."


@dataclass(frozen=True)
class Weights:
    """A model: its sizes, and a function that returns a whole weight, [out, in] of matrices, by its name."""

    shape: Transformer
    get: Callable[[str], Tensor]
    rope_base: float = 500_000.0
    eps: float = 1e-5


def sizes_of(shape: Transformer) -> dict[str, tuple[int, ...]]:
    """Returns names and sizes of the weights outside layers, and of those of a layer after its prefix."""
    width = shape.hidden // shape.heads
    rows, kv = shape.heads * width, shape.kv_heads * width
    return {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocabulary, shape.hidden),
        "self_attn.q_proj.weight": (rows, shape.hidden),
        "self_attn.k_proj.weight": (kv, shape.hidden),
        "self_attn.v_proj.weight": (kv, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, rows),
        "mlp.gate_proj.weight": (shape.ffn, shape.hidden),
        "mlp.up_proj.weight": (shape.ffn, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.ffn),
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
    }


def random_weights(name: str, layers: int | None, seed: int, device: torch.device) -> Weights:
    """Returns a preset with random weights, which depend only on their names and the seed. They are drawn on `device`
    each time one is asked for, so that a rank never holds the whole model."""
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
    sizes = sizes_of(shape)

    def get(full: str) -> Tensor:
        size = sizes[full if full in sizes else full.split(".", 3)[3]]
        generator = torch.Generator(device).manual_seed(hash_of(full) + seed)
        values = torch.randn(size, generator=generator, device=device)
        return values.mul_(0.1).add_(1) if len(size) == 1 else values.mul_(0.6 / size[1] ** 0.5)

    return Weights(shape, get)


def hash_of(text: str) -> int:
    """Returns a number below 2^40 that is the same in every process."""
    value = 0
    for letter in text.encode():
        value = (value * 257 + letter) % (1 << 40)
    return value


def saved_weights(path: str) -> Weights:
    """Returns a Llama of transformers, by its folder or its name.

    Raises:
        ValueError: a model of another kind, or one with rotations, heads or biases that the decoder does not have.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    width = config.hidden_size // config.num_attention_heads
    found = {"model_type": config.model_type, "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias,
             "rope_type": rope.get("rope_type", "default"), "hidden_act": config.hidden_act,
             "head_dim": getattr(config, "head_dim", None) or width}  # fmt: skip
    wanted = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "rope_type": "default",
              "hidden_act": "silu", "head_dim": width}  # fmt: skip
    for key, value in wanted.items():
        if found[key] != value:
            raise ValueError(f"decode_llama: expected a model with {key} {value}, got {found[key]}. Use another one.")
    shape = Transformer(path, config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
                        config.num_key_value_heads, config.intermediate_size, config.vocab_size)  # fmt: skip
    values = dict(model.state_dict())
    values.setdefault("lm_head.weight", values["model.embed_tokens.weight"])  # tied
    return Weights(shape, values.__getitem__, rope.get("rope_theta", 10_000.0), config.rms_norm_eps)
