"""Applies plans of styles to whole models."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torch_overlap.nn.layout import comm_of
from torch_overlap.nn.styles.adapters import parallelize_adapters, refuse_plain_parameters
from torch_overlap.nn.styles.base import Style, matching_modules
from torch_overlap.nn.styles.lora import expect_adapters
from torch_overlap.nn.styles.padding import SharedSequence
from torch_overlap.nn.styles.pretrained_state import mark_parallel


class Replicated(Style):
    """Replicates what no other style of the plan has taken: its parameters and gradients are whole on every rank.

    For modules whose input is the same on all ranks, such as an embedding before `ShardInput`. `parallelize` applies it
    last, to the whole model; in a plan for `parallelize_module` it is the entry `"": Replicated()`, at the end.
    """

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._replicate(module, device_mesh, is_partial=False)
        return module


def parallelize(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle], *, src_data_rank: int | None = 0
) -> nn.Module:
    """Applies a plan to a model, and replicates all parameters that the plan does not name. Collective.

    Afterwards every parameter is a DTensor of `mesh`, and state_dict() has DTensors of whole tensors. Of a model of
    transformers, `save_pretrained`, called by all ranks, writes whole tensors on rank 0. LoRA adapters of PEFT in the
    model are split with their linears; for those that are added later see `parallelize_adapters`. A forward pass with
    plain parameters, of modules that were added later, raises StateError.

    Args:
        model: the unsharded model, the same code on all ranks.
        mesh: a mesh of one dimension of backend "torch_overlap", as `mesh["tp"]`.
        plan: module names, which may have `*`, and styles.
        src_data_rank: the rank whose values all ranks get; None: each rank keeps its own, which must be equal.

    Returns: the model.

    Raises:
        TypeError, ValueError: as the styles do; a key matches no module; a parameter that two modules share would be
            split in two ways; an adapter of PEFT that is not plain LoRA on a linear.
    """
    expect_adapters(model)
    for key in plan:
        if not any(True for _ in matching_modules(model, key)):
            raise ValueError(f"parallelize: expected module names of {type(model).__name__} as the keys of the plan, "
                             f"got '{key}', which matches none. Compare it with those of named_modules().")  # fmt: skip
    styles = [style for style in plan.values() if isinstance(style, Style)]
    sequence = SharedSequence(comm_of(mesh), is_shared=True)
    try:
        for style in styles:
            style.sequence = sequence
        for key, entry in plan.items():
            _apply(model, mesh, key, entry, src_data_rank)
    finally:
        for style in styles:
            style.sequence = None
    parallelize_adapters(model, src_data_rank=src_data_rank)
    parallelize_module(model, mesh, Replicated(), src_data_rank=src_data_rank)
    mark_parallel(model, mesh.size())
    refuse_plain_parameters(model)
    return model


def _apply(model: nn.Module, mesh: DeviceMesh, key: str, style: ParallelStyle, src_data_rank: int | None) -> None:
    """Applies one entry of a plan. An error of the style names the entry."""
    try:
        parallelize_module(model, mesh, {key: style}, src_data_rank=src_data_rank)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise
        raise type(error)(f"{error} (entry '{key}' of the plan)") from error
