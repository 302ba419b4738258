"""Adapters that are added to a model after its plan, and the check that finds parameters which were added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_overlap._C import StateError
from torch_overlap.nn.layout import layout_of
from torch_overlap.nn.styles.linear import split_adapters
from torch_overlap.nn.styles.lora import expect_adapters, is_lora

_IS_GUARDED = "_expects_dtensors"


def parallelize_adapters(model: nn.Module, *, src_data_rank: int | None = 0) -> nn.Module:
    """Splits the LoRA adapters of PEFT that were added to a model after `parallelize`. Collective.

    Every adapter that is still whole gets the layout of its base layer, with the values of rank `src_data_rank`; None:
    each rank keeps its own, which must be equal. For adapters that `add_adapter` or `load_adapter` of PEFT have made;
    `torch_overlap.compat.peft.get_peft_model` calls it. Make the optimizer afterwards.

    Returns: the model.

    Raises:
        ValueError: an adapter that is not plain LoRA on a linear.
    """
    expect_adapters(model)
    for module in model.modules():
        if is_lora(module):
            split_adapters(module, src_data_rank)
    return model


def refuse_plain_parameters(model: nn.Module) -> None:
    """Makes forward of a model raise StateError if a module with plain parameters was added to it."""
    for module in (model, *model.children()):
        if not vars(module).get(_IS_GUARDED):
            vars(module)[_IS_GUARDED] = True
            module.register_forward_pre_hook(_expect_dtensors)


def _expect_dtensors(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for name, child in _own_modules(module, ""):
        if child._parameters and layout_of(child) is None:
            for parameter, value in child._parameters.items():
                if value is not None and not isinstance(value, DTensor):
                    raise StateError(f"forward: expected all parameters of {type(module).__name__} as DTensors, got "
                                     f"'{name}{parameter}' as a plain tensor. It was added after parallelize, and its "
                                     "values and gradients differ between the ranks: add it before, or call "
                                     "parallelize_adapters(model) for LoRA, parallelize(module, mesh, {}) for "
                                     "others.")  # fmt: skip


def _own_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields `module` and its descendants, except those that are checked when they are called."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not vars(child).get(_IS_GUARDED):
            yield from _own_modules(child, f"{prefix}{name}.")
