"""Styles that replace nn.Linear by the layers of torch_overlap.nn."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap.nn._joined import join
from torch_overlap.nn.layout import comm_of
from torch_overlap.nn.linear import ColumnParallelLinear, RowParallelLinear
from torch_overlap.nn.styles.base import Style, become, first_tensor, with_first
from torch_overlap.nn.styles.padding import SharedSequence


def _split_columns(linear: nn.Linear, prefix: str = "") -> dict[str, int]:
    return {prefix + name: 0 for name, _ in linear.named_parameters()}


class ColumnParallel(Style):
    """Replaces an nn.Linear by a ColumnParallelLinear. For linears that share their input see SharedGather.

    Args:
        sequence_parallel: if True, the input is this rank's part of `sequence_dim`; else the same on all ranks.
        sequence_dim: the dimension of the input.
        multiple_of: required divisor of each rank's output features, such as the size of a head.
        gather_output, keep_gathered, algorithm, require_fused, fp8: as for ColumnParallelLinear.

    Raises:
        TypeError, ValueError: not an nn.Linear; features that do not divide. As from `comm_of`.
    """

    def __init__(self, *, sequence_parallel: bool = True, sequence_dim: int = 1, multiple_of: int = 1,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(sequence_parallel, sequence_dim, **options)
        self.multiple_of = multiple_of

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        return _split_columns(self._columns(module, ranks, self.multiple_of))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        linear = self._columns(module, comm.get_size(), self.multiple_of)
        self._synchronize(linear, comm)
        layer = ColumnParallelLinear.from_linear(linear, device_mesh, gather_dim=self.sequence_dim, **self.options)
        become(module, layer)
        if self.sequence_parallel:
            sequence = self._sequence(comm)
            module.register_forward_hook(lambda _, args, y: sequence.trim(y, self.sequence_dim))
        return module


class RowParallel(Style):
    """Replaces an nn.Linear by a RowParallelLinear.

    Args:
        sequence_parallel: if True, the output is this rank's part of `sequence_dim`; else the same on all ranks.
        sequence_dim: the dimension of the output.
        input_is_parallel, algorithm, require_fused, fp8: as for RowParallelLinear.

    Raises: as ColumnParallel.
    """

    def __init__(self, *, sequence_parallel: bool = True, sequence_dim: int = 1, **options: Any) -> None:
        super().__init__(sequence_parallel, sequence_dim, **options)

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        self._linear(module)
        return {"weight": 1}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm, linear = comm_of(device_mesh), self._linear(module)
        self._synchronize(linear, comm)
        layer = RowParallelLinear.from_linear(linear, device_mesh, scatter_dim=self.sequence_dim, **self.options)
        become(module, layer)
        if self.sequence_parallel:
            sequence = self._sequence(comm)
            module.register_forward_pre_hook(lambda _, args: (sequence.pad(args[0], self.sequence_dim), *args[1:]))
        return module


class _Gather:
    """State that the linears of one SharedGather share during one call of their parent."""

    def __init__(self, sequence: SharedSequence, argument: str) -> None:
        self.sequence, self.argument = sequence, argument
        self.layers: list[ColumnParallelLinear] = []
        self.input: Tensor | None = None
        self.stand_in: Tensor | None = None
        self.outputs: list[Tensor] | None = None

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = first_tensor("SharedGather", args, kwargs, self.argument)
        self.input, self.stand_in, self.outputs = x, x, None
        first = self.layers[0]
        if first.sequence_parallel:
            shape = list(x.shape)
            shape[first.gather_dim] = self.sequence.gathered_rows(x.size(first.gather_dim))
            # The module may read shape, dtype and device. NaN makes a result visible that reads the values anyway.
            self.stand_in = x.detach().new_full((), float("nan")).expand(shape)
        return with_first(args, kwargs, self.argument, self.stand_in)

    def end(self, *_: object) -> None:
        self.input = self.stand_in = self.outputs = None

    def output(self, index: int, x: Tensor) -> Tensor:
        if x is not self.stand_in or self.input is None:
            raise ValueError(
                "SharedGather: expected its linears to get the module's first argument unchanged, got another tensor; "
                "use ColumnParallel for those that do not"
            )
        if self.outputs is None:
            weights = [weight for layer in self.layers for weight in layer.weights]
            biases = [bias for layer in self.layers for bias in layer.biases]
            first = self.layers[0]
            self.outputs = first._products(self.input, weights, biases)
            if first.sequence_parallel:
                self.outputs = [self.sequence.trim(y, first.gather_dim) for y in self.outputs]
        return self.outputs[index]


class _SharedColumn(ColumnParallelLinear):
    shared: _Gather
    index: int

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.output(self.index, x)

    def _get_name(self) -> str:
        return "ColumnParallelLinear"


class SharedGather(Style):
    """Makes linears that all take a module's first argument column-parallel, with one gather for all of them.

    For the parent of query, key and value, or of gate and up: its first linear computes the products of all, while it
    gathers. With sequence_parallel the parent's code sees a placeholder for its argument that has the gathered shape
    and no values, so that views by batch and sequence are correct; it must not use it otherwise.

    Args:
        names: names of the linears, as attributes of the module.
        argument: the name of the module's first argument, if it is passed by name.
        others: as for ColumnParallel.

    Raises: as ColumnParallel; ValueError in forward if a linear gets another tensor.
    """

    def __init__(self, *names: str, sequence_parallel: bool = True, sequence_dim: int = 1, multiple_of: int = 1,
                 argument: str = "hidden_states", **options: Any) -> None:  # fmt: skip
        super().__init__(sequence_parallel, sequence_dim, **options)
        self.names, self.multiple_of, self.argument = names, multiple_of, argument
        if not names:
            raise ValueError("SharedGather: expected the names of one or more linears, got none. Pass those that take "
                             "the module's first argument.")  # fmt: skip

    def _linears(self, module: nn.Module, ranks: int) -> dict[str, nn.Linear]:
        return {n: self._columns(module.get_submodule(n), ranks, self.multiple_of, n) for n in self.names}

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        split: dict[str, int] = {}
        for name, linear in self._linears(module, ranks).items():
            split |= _split_columns(linear, f"{name}.")
        return split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        linears = self._linears(module, comm.get_size())
        shared = _Gather(self._sequence(comm), self.argument)
        layers = []
        for index, linear in enumerate(linears.values()):
            self._synchronize(linear, comm)
            layer = _SharedColumn.from_linear(linear, device_mesh, gather_dim=self.sequence_dim, **self.options)
            layer.shared, layer.index = shared, index
            layers.append(layer)
        for name in ("weight", "bias"):  # multiplied as one
            join([(layer, name) for layer in layers])
        shared.layers = [become(linear, layer) for linear, layer in zip(linears.values(), layers, strict=True)]
        module.register_forward_pre_hook(shared.begin, with_kwargs=True)
        module.register_forward_hook(shared.end, always_call=True)
        return module
