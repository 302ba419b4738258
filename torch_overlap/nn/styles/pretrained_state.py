"""The properties of a parallelized model of Hugging Face transformers that its saving and training code reads."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from torch_overlap._C import StateError


def is_pretrained(model: nn.Module) -> bool:
    """Returns True for a model of transformers."""
    return any(cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
               for cls in type(model).__mro__)  # fmt: skip


def mark_parallel(model: nn.Module, ranks: int) -> None:
    """Makes save_pretrained of the models of transformers in `model`, and of PEFT, gather DTensors.

    It is not a part of the config's files. transformers' Trainer takes the number of ranks that share a batch from the
    model. Does nothing for another model, and before transformers 5.
    """
    models = [module for module in model.modules() if is_pretrained(module)]
    if not models:
        return
    try:
        distributed = importlib.import_module("transformers.distributed.configuration_utils")
    except ImportError:
        return
    for module in models:
        _mark(module, distributed.DistributedConfig(tp_size=ranks, tp_plan={}), ranks)


def _mark(model: Any, config: Any, ranks: int) -> None:
    def resize_token_embeddings(*_: Any, **__: Any) -> None:
        raise StateError("resize_token_embeddings: expected a model of whole tensors, got one that parallelize has "
                         "split. Resize the vocabulary before parallelize.")  # fmt: skip

    seen: set[int] = set()
    again = []  # names under which a tied parameter comes again; once gathered, save_pretrained would not see the tie
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            again.append(name.replace(".base_layer.", "."))
        seen.add(id(parameter))
    if again:
        model._keys_to_ignore_on_save = [*(model._keys_to_ignore_on_save or ()), *again]
    model.config.distributed_config = config
    model._tp_size = ranks
    model.resize_token_embeddings = resize_token_embeddings
