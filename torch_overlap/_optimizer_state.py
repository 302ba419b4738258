"""Optimizer states of torch.distributed.checkpoint.state_dict, with their tensors converted for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Convert = Callable[[str, Any], Tensor]  # arguments: the name of the state, and the tensor


def _own(module: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the state, complete even before the first step, and the parameters by their names in it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    named = {name: p for group, names in groups for p, name in zip(group["params"], names["params"], strict=True)}
    return state, named


def _is_part(who: str, value: object, parameter: Tensor) -> bool:
    """Returns True if the state is sharded like the parameter; otherwise it is the same on all ranks."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape != parameter.shape and value.numel() != 1:
        raise ValueError(f"{who}: expected a state of one element or of shape {list(parameter.shape)}, as this rank's "
                         f"part of the parameter, got {list(value.shape)}")  # fmt: skip
    return value.shape == parameter.shape


def sharded(module: nn.Module, optimizer: Optimizer, wrap: Mapping[int, Convert]) -> dict[str, Any]:
    """Returns the state, with `wrap` of the parameter's id applied to the tensors that are sharded like it."""
    state, parameters = _own(module, optimizer)
    for name, values in state["state"].items():
        if convert := wrap.get(id(parameters[name])):
            state["state"][name] = {
                key: convert(f"{name}.{key}", value)
                if _is_part(f"sharded_optimizer_state_dict of '{name}.{key}'", value, parameters[name]) else value
                for key, value in values.items()
            }  # fmt: skip
    return state


def load(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], unwrap: Mapping[int, Convert]) -> None:
    """Loads a state that `sharded` returned, with `unwrap` of the parameter's id applied to its sharded tensors."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    own, parameters = _own(module, optimizer)
    parts: dict[str, Any] = {name: dict(values) for name, values in state["state"].items()}
    for name, values in own["state"].items():
        if convert := unwrap.get(id(parameters[name])):
            for key, value in values.items():
                if key in parts.get(name, {}) and _is_part(f"'{name}.{key}'", value, parameters[name]):
                    parts[name][key] = convert(f"{name}.{key}", parts[name][key])
    set_optimizer_state_dict(module, optimizer, {**state, "state": parts})
