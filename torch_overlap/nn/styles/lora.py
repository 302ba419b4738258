"""LoRA adapters of PEFT: which are supported, and their dropout on a part of the input.

A LoRA layer holds the linear as `base_layer`, and adds lora_B(lora_A(dropout(x))) * scaling to its result. Layers are
recognised by their class, without importing PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_overlap.nn.layout import layout_of

_LINEAR = ("peft.tuners.lora.layer", "Linear.forward")
_TUNERS = {("peft.tuners.tuners_utils", "BaseTunerLayer"), ("peft.utils.other", "AuxiliaryTrainingWrapper")}


def _is_tuner(module: nn.Module) -> bool:
    return any((cls.__module__, cls.__name__) in _TUNERS for cls in type(module).__mro__)


def is_lora(module: nn.Module) -> bool:
    """Returns True for a linear with LoRA."""
    forward = getattr(type(module), "forward", None)
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) == _LINEAR


def peft_prefix(model: nn.Module) -> str:
    """Returns the prefix of the names of the base model's modules in a model of PEFT; empty for another model."""
    is_peft = any(cls.__module__ == "peft.peft_model" and cls.__name__ == "PeftModel" for cls in type(model).__mro__)
    return "base_model.model." if is_peft else ""


def expect_lora(module: Any, name: str) -> None:
    """Raises ValueError, naming the module, for a LoRA layer that is no plain LoRA on a linear."""
    got = ""
    if module.lora_variant:
        got = ", ".join(sorted({type(variant).__name__ for variant in module.lora_variant.values()}))
    elif len(module.lora_magnitude_vector):
        got = "DoRA"
    elif not {type(dropout) for dropout in module.lora_dropout.values()} <= {nn.Identity, nn.Dropout, PartialDropout}:
        got = "another dropout"
    if got:
        raise ValueError(f"parallelize: expected plain LoRA at '{name}', got {got}. Use LoraConfig without variants, "
                         "or leave the module out of target_modules.")  # fmt: skip


def expect_adapters(model: nn.Module) -> None:
    """Raises ValueError, naming the module, for modules of PEFT that are not plain LoRA on linears."""
    if peft_prefix(model) and any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ValueError("parallelize: expected LoRA as the adapter of the model, got prompt learning. Parallelize the "
                         "model without it.")  # fmt: skip
    for name, module in model.named_modules():
        if is_lora(module):
            expect_lora(module, name)
        elif _is_tuner(module):
            raise ValueError(f"parallelize: expected plain LoRA on linears, got {type(module).__name__} at '{name}'. "
                             "Leave it out of target_modules and modules_to_save.")  # fmt: skip


def inner_modules(module: nn.Module) -> set[str]:
    """Returns the names of the modules inside of LoRA layers of `module`, relative to it."""
    return {f"{name}.{inner}" if name else inner for name, layer in module.named_modules() if is_lora(layer)
            for inner, _ in layer.named_modules() if inner}  # fmt: skip


def new_adapters(layer: Any) -> list[str]:
    """Returns the names of the adapters of a LoRA layer that have no layout yet."""
    return [name for name, linear in layer.lora_A.items() if layout_of(linear) is None]


# Takes this rank's part of an input. Returns the shape of the whole, and a function that takes the same part of it.
Take = Callable[[Tensor], tuple[list[int], Callable[[Tensor], Tensor]]]


class PartialDropout(nn.Dropout):
    """Dropout of this rank's part of a tensor.

    Draws the mask of the whole tensor and applies its part, so ranks whose generators have the same state drop what one
    rank would.
    """

    def __init__(self, p: float, take: Take) -> None:
        super().__init__(p)
        self._take = take

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input, with elements dropped in training."""
        if not self.training or self.p == 0:
            return input
        shape, own_part = self._take(input)
        with torch.no_grad():
            mask = own_part(F.dropout(input.new_ones(shape), self.p))
        return input * mask


def split_dropout(layer: Any, name: str, take: Take) -> None:
    """Makes the dropout of an adapter one of this rank's part of the input."""
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout):
        layer.lora_dropout[name] = PartialDropout(dropout.p, take).train(dropout.training)
