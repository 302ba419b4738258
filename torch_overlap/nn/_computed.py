"""Errors for weights that are computed (weight_norm, spectral_norm, pruning), or that another package has replaced.

The layers and plans split, replicate and sum parameters. A weight that torch computes from other parameters is none.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.nn.utils import parametrize

from torch_overlap._C import StateError

_ADVICE = ("Before the split, remove what computes it (remove_parametrizations, remove_weight_norm, "
           "remove_spectral_norm, prune.remove)")  # fmt: skip
_KINDS = ("orig", "g", "v")  # weight_orig and the like are parameters from which a hook computes `weight`


def computed_by_hook(module: nn.Module) -> str | None:
    """Returns the name of a tensor that a hook of torch.nn.utils computes before forward, or None."""
    for name, _ in module.named_parameters(recurse=False):
        base, _, kind = name.rpartition("_")
        if kind in _KINDS and isinstance(vars(module).get(base), Tensor):
            return base
    return None


def expect_no_hooks(who: str, module: nn.Module) -> None:
    """Raises TypeError if a hook of torch.nn.utils computes a weight of the module."""
    name = computed_by_hook(module)
    if name is not None:
        raise TypeError(f"{who}: expected '{name}' of {type(module).__name__} as a parameter, got one that a hook "
                        f"computes. {_ADVICE}; modules that are not split may have torch.nn.utils.parametrizations."
                        )  # fmt: skip


def expect_own_weight(who: str, module: nn.Module) -> None:
    """Raises TypeError if the weight of a module that is to be split is computed."""
    expect_no_hooks(who, module)
    if parametrize.is_parametrized(module):
        raise TypeError(f"{who}: expected {type(module).__bases__[0].__name__} with parameters of its own, got "
                        f"{type(module).__name__}. {_ADVICE}.")  # fmt: skip


def expect_linear(who: str, what: str, module: nn.Module, advice: str, at: str = "") -> nn.Linear:
    """Returns a module that is to be split. Raises TypeError if it is anything but x @ weight.t() + bias of its own
    parameters, since only these are taken.

    Args:
        who: the caller.
        what: the modules that it takes.
        module: the module.
        advice: for a module that is none of them.
        at: the place of the module in its parent, for the message.
    """
    if isinstance(module, nn.Linear):
        expect_own_weight(who + at, module)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward or [*module.children()]:
        raise TypeError(f"{who}: expected {what}{at}, got {type(module).__name__}; {advice}")
    return module


def expect_parameters(module: nn.Module, names: Collection[str], late: Collection[str]) -> None:
    """Raises StateError if `module` no longer has its parameters `names`, or computes with a DTensor that is none.

    Args:
        module: a module that is about to compute with plain tensors.
        names: parameters that it had under the plan.
        late: its parametrizations that were registered after the plan.
    """
    missing = [name for name in names if name not in module._parameters]
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, DTensor)}
    if tensors:  # one that is detached, such as an average of weights, is not computed with
        computed = computed_by_hook(module)
        missing += [name for name, value in tensors.items() if value.requires_grad or name == computed]
    missing = missing or [name for name in late if isinstance(getattr(module, name), DTensor)]
    if missing:
        raise StateError(f"{type(module).__name__}: expected '{missing[0]}' as a parameter, as under the plan, got a "
                         "tensor that is none. Register torch.nn.utils.parametrizations before the plan; for data "
                         "parallelism use fully_shard over another axis of the mesh.")  # fmt: skip


def wrong_layout(module: nn.Module, name: str, parameter: Tensor, placement: Placement) -> StateError:
    """Returns the error for a parameter that is not a DTensor of `placement`, with advice for how it became so."""
    got = f"one of {parameter.placements}" if isinstance(parameter, DTensor) else "a plain tensor"
    if not isinstance(parameter, DTensor):
        advice = ("Load whole tensors by load_full_state_dict, without assign=True; pass DTensors to functional_call; "
                  "for data parallelism use fully_shard over another axis of the mesh, not replicate.")  # fmt: skip
    elif name in module._parameters:
        advice = f"Make it nn.Parameter(parameter.detach().redistribute(placements=[{placement!r}]))."
    else:
        advice = f"{_ADVICE}."
    return StateError(f"{type(module).__name__}: expected '{name}' as a DTensor of {(placement,)}, got {got}. {advice}")
