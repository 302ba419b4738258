"""Finds parameters that change in place between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def watch_changes(parts: Iterable[tuple[Tensor | None, Tensor | None]], outputs: Any) -> None:
    """Makes torch find a parameter that is changed in place between the forward and the backward pass of a module.

    torch compares versions of the tensors that an operator has saved. What `local_parameter` returns for a DTensor, or
    for a parameter whose gradient is summed, has the memory of the parameter and a version of its own.

    Args:
        parts: pairs of a parameter and its `local_parameter`.
        outputs: the result of the module; tensors in tuples, lists and dicts are found.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    watched = [(parameter, parameter._version, part) for parameter, part in parts
               if parameter is not None and part is not None and part is not parameter
               and not parameter.is_inference()]  # fmt: skip
    if watched:
        hook = partial(_pass_on_changes, watched)
        for y in _tensors(outputs):
            if y.requires_grad:
                y.register_hook(hook)


def _pass_on_changes(watched: list[tuple[Tensor, int, Tensor]], _: Tensor) -> None:
    for parameter, version, part in watched:
        if parameter._version != version:
            increment_version(part)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _tensors(value)
