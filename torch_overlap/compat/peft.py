"""PEFT on a model that `torch_overlap.nn.styles.parallelize` has split.

Before the plan PEFT needs nothing from here: `parallelize` splits the adapters that a model has. `get_peft_model` adds
some to a model that is split already.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from torch_overlap.nn import ColumnParallelLinear, RowParallelLinear
from torch_overlap.nn.styles import parallelize_adapters

__all__ = ["get_peft_model", "support_parallel_layers"]

_INITS = (True, False, "gaussian")


def support_parallel_layers(config: Any) -> Any:
    """Makes PEFT accept the layers of torch_overlap.nn as targets of a LoraConfig, and returns it.

    Uses PEFT's registration of custom modules. For `PeftModel.from_pretrained(model, folder, config=config)`, after
    which `parallelize_adapters(model)` splits the adapters.

    Raises:
        ValueError: an initialization that reads the base layer's weights.
    """
    lora = importlib.import_module("peft.tuners.lora")
    if config.init_lora_weights not in _INITS:
        raise ValueError(f"get_peft_model: expected init_lora_weights of {_INITS} for a parallelized model, got "
                         f"{config.init_lora_weights!r}. Add the adapters before parallelize.")  # fmt: skip
    config._register_custom_module({ColumnParallelLinear: lora.Linear, RowParallelLinear: lora.Linear})
    return config


def _all_linear(model: Any) -> list[str]:
    """Returns the names of the linears of a model, except its output embedding: PEFT's "all-linear"."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not output]


def get_peft_model(model: nn.Module, config: Any, *, src_data_rank: int | None = 0, **options: Any) -> Any:
    """Adds LoRA to a model that `parallelize` has split, as `peft.get_peft_model` does to a whole one. Collective.

    The adapters are drawn whole on every rank, take the values of rank `src_data_rank`, and are split with their
    linears. Make the optimizer afterwards.

    Args:
        model: the parallelized model.
        config: a LoraConfig.
        src_data_rank: the rank whose values all ranks get; None: each rank keeps its own, which must be equal.
        options: those of peft.get_peft_model.

    Returns: the model of PEFT.

    Raises:
        ValueError: an adapter that is not plain LoRA on a linear.
    """
    peft = importlib.import_module("peft")
    support_parallel_layers(config)
    if config.target_modules == "all-linear":
        config.target_modules = set(_all_linear(model))
    with warnings.catch_warnings():
        # PEFT reads in_features and out_features of layers that it does not know.
        warnings.filterwarnings("ignore", "Unsupported layer type")
        wrapped = peft.get_peft_model(model, config, **options)
    return parallelize_adapters(wrapped, src_data_rank=src_data_rank)
