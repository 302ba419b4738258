"""The base of all styles."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from torch_overlap._C import TorchComm
from torch_overlap.nn._computed import expect_linear
from torch_overlap.nn.layout import comm_of, layout_of, replace_parameter, replicate
from torch_overlap.nn.styles.lora import expect_lora, is_lora
from torch_overlap.nn.styles.padding import SharedSequence

_SEQUENCE = "_sequence"  # of a layer: the sequence of its model
_Layer = TypeVar("_Layer", bound=nn.Module)


def matching_modules(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules as parallelize_module finds them: one pattern per part of a name; an empty pattern for the module
    itself."""
    wanted = pattern.split(".") if pattern else []
    for name, owner in module.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            yield name, owner


class Style(ParallelStyle):
    """The common part: the options of the layers, and values of rank `src_data_rank` on all ranks, as in torch's
    styles."""

    sequence: SharedSequence | None = None  # of the model; `parallelize` sets it while it applies a plan

    def __init__(self, sequence_parallel: bool = True, sequence_dim: int = 1, **options: Any) -> None:
        super().__init__()
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.options = {"sequence_parallel": sequence_parallel, **options}

    def _sequence(self, comm: TorchComm) -> SharedSequence:
        return self.sequence or SharedSequence(comm, is_shared=False)

    def _remember(self, layer: nn.Module, comm: TorchComm) -> SharedSequence:
        """Returns the sequence of the model, which adapters that are added to the layer later will share."""
        sequence = self._sequence(comm)
        vars(layer)[_SEQUENCE] = sequence
        return sequence

    def _sequence_of(self, layer: nn.Module, comm: TorchComm) -> SharedSequence:
        sequence = vars(layer).get(_SEQUENCE)
        return sequence if isinstance(sequence, SharedSequence) else self._sequence(comm)

    def _linear(self, module: nn.Module, name: str = "") -> nn.Linear:
        at = f" at '{name}'" if name else ""
        return expect_linear(type(self).__name__, "an nn.Linear", module, "change the plan", at)

    def _base_linear(self, module: Any, name: str = "") -> nn.Linear:
        """Returns the nn.Linear that a module is, or that it holds under LoRA."""
        if not is_lora(module):
            return self._linear(module, name)
        expect_lora(module, name or type(module).__name__)
        return self._linear(module.get_base_layer(), name)

    def _synchronize(self, module: nn.Module, comm: TorchComm) -> None:
        """Moves parameters and buffers to the communicator's device, with the values of rank `src_data_rank`."""
        for child in module.modules():
            if layout_of(child) is not None:
                continue
            for name, parameter in child.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    raise TypeError(f"{type(self).__name__}: expected plain parameters, got '{name}' of "
                                    f"{type(child).__name__} as a DTensor of {parameter.device_mesh}. Parallelize the "
                                    "model once: without tp_plan, and before fully_shard.")  # fmt: skip
                if not parameter.is_meta:
                    parameter.data = parameter.data.to(comm.get_device()).contiguous()
                    if self.src_data_rank is not None:
                        comm.broadcast(parameter.data, self.src_data_rank, async_op=False)
            for name, buffer in child.named_buffers(recurse=False):
                if not buffer.is_meta:
                    buffer = buffer.to(comm.get_device()).contiguous()
                    setattr(child, name, buffer)
                    if self.src_data_rank is not None and buffer.numel() > 0:
                        comm.broadcast(buffer, self.src_data_rank, async_op=False)

    def _columns(self, linear: nn.Linear, ranks: int, multiple_of: int) -> nn.Linear:
        if linear.out_features % (ranks * multiple_of) != 0:
            raise ValueError(
                f"{type(self).__name__}: expected out_features divisible by {ranks} ranks times {multiple_of} "
                f"(multiple_of), got {linear.out_features}; use fewer ranks"
            )
        return linear

    def _replicate(self, module: nn.Module, mesh: DeviceMesh, *, is_partial: bool) -> TorchComm:
        """Makes the parameters that no style has taken whole on every rank. Returns the communicator of the mesh."""
        comm = comm_of(mesh)
        self._synchronize(module, comm)
        replicate(module, comm, mesh, is_partial=is_partial)
        return comm

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        """Returns the parameters of `module` that are split over `ranks` ranks: name -> dimension. Others stay whole.

        Raises: as with parallelize_module.
        """
        return {}


def become(module: nn.Module, layer: _Layer) -> _Layer:
    """Turns `module` into `layer`, keeping its hooks: parallelize_module ignores the module that a style returns."""
    for name, old in module.named_parameters(recurse=False):
        replace_parameter(layer, name, old)
    hooks = {name: value for name, value in vars(module).items() if "hook" in name}
    module.__dict__ = {**vars(layer), **hooks}
    module.__class__ = type(layer)
    assert isinstance(module, type(layer))
    return module


def first_tensor(who: str, args: tuple[Any, ...], kwargs: dict[str, Any], argument: str) -> Tensor:
    x = args[0] if args else kwargs.get(argument)
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: expected a tensor as the first argument or as '{argument}', got {type(x).__name__}; "
                        "name it with argument=...")  # fmt: skip
    return x


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, x: Tensor) -> Any:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, argument: x})
