"""Styles that replace nn.Linear by the layers of torch_overlap.nn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap.nn._changes import watch_changes
from torch_overlap.nn._joined import are_joined, rejoin
from torch_overlap.nn.layout import comm_of, layout_of
from torch_overlap.nn.linear import ColumnParallelLinear, RowParallelLinear
from torch_overlap.nn.styles.base import Style, become, first_tensor, with_first
from torch_overlap.nn.styles.lora import new_adapters, split_dropout
from torch_overlap.nn.styles.padding import SharedSequence
from torch_overlap.nn.styles.sequence import SequenceParallel


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
        return _split_columns(self._columns(self._linear(module), ranks, self.multiple_of))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        linear = self._columns(self._base_linear(module), comm.get_size(), self.multiple_of)
        self._synchronize(linear, comm)
        layer = ColumnParallelLinear.from_linear(linear, device_mesh, gather_dim=self.sequence_dim, **self.options)
        become(linear, layer)
        sequence = self._remember(linear, comm)
        if self.sequence_parallel:
            linear.register_forward_hook(lambda _, args, y: sequence.trim(y, self.sequence_dim))
        if linear is not module:
            split_adapters(module, self.src_data_rank)
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
        comm, linear = comm_of(device_mesh), self._base_linear(module)
        self._synchronize(linear, comm)
        layer = RowParallelLinear.from_linear(linear, device_mesh, scatter_dim=self.sequence_dim, **self.options)
        become(linear, layer)
        sequence = self._remember(linear, comm)
        if self.sequence_parallel:

            def pad(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                x = first_tensor("RowParallel", args, kwargs, "input")
                return with_first(args, kwargs, "input", sequence.pad(x, self.sequence_dim))

            linear.register_forward_pre_hook(pad, with_kwargs=True)
        if linear is not module:
            split_adapters(module, self.src_data_rank)
        return module


class _Gather:
    """State that the linears of one SharedGather share during one call of their parent."""

    def __init__(self, sequence: SharedSequence, argument: str) -> None:
        self.sequence, self.argument = sequence, argument
        self.layers: list[_SharedColumn] = []
        self.may_move = True  # may the parameters be moved next to each other?
        self.input: Tensor | None = None
        self.stand_in: Tensor | None = None
        self.outputs: list[Tensor] | None = None
        self.is_grad_enabled = False  # in the module, outside of its linears

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = first_tensor("SharedGather", args, kwargs, self.argument)
        self.input, self.stand_in, self.outputs = x, x, None
        self.is_grad_enabled = torch.is_grad_enabled()
        first = self.layers[0]
        if first.sequence_parallel:
            shape = list(x.shape)
            shape[first.gather_dim] = self.sequence.gathered_rows(x.size(first.gather_dim))
            # The module may read shape, dtype and device. NaN makes a result visible that reads the values anyway.
            self.stand_in = x.detach().new_full((), float("nan")).expand(shape)
        return with_first(args, kwargs, self.argument, self.stand_in)

    def groups(self) -> list[list[nn.Parameter]]:
        """Returns the weights of all linears, and their biases if all have one."""
        groups = [[getattr(layer, name) for layer in self.layers] for name in ("weight", "bias")]
        return [group for group in groups if all(parameter is not None for parameter in group)]

    def rejoin(self) -> None:
        for group in self.groups():
            rejoin(group, self.layers[0].mesh)
        self.may_move = not all(are_joined(group) for group in self.groups())

    def rejoin_copy(self) -> None:
        """Joins the parameters of a copy, of which a part is made: the last one finds all."""
        layers = vars(self).get("layers", ())
        if layers and all("_parameters" in vars(layer) for layer in layers):
            self.rejoin()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.rejoin_copy()

    def end(self, *_: object) -> None:
        self.input = self.stand_in = self.outputs = None

    def pass_rows(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gives LoRA this rank's rows for the placeholder."""
        return (self.input, *args[1:]) if args and args[0] is self.stand_in else args

    def output(self, index: int, x: Tensor) -> Tensor:
        if self.input is None:
            raise ValueError(
                "SharedGather: expected its linears to be called by their module, got a call outside of its forward, "
                "as a checkpoint of one linear makes in backward; checkpoint the whole module, or use ColumnParallel"
            )
        if x is not self.stand_in and x is not self.input:
            raise ValueError(
                "SharedGather: expected its linears to get the module's first argument unchanged, got another tensor; "
                "use ColumnParallel for those that do not"
            )
        if self.is_grad_enabled and not torch.is_grad_enabled():
            # The first linear computes the products of all: none of them would have a gradient.
            raise ValueError(
                "SharedGather: expected gradients enabled in its linears as in their module, got one under no_grad "
                "or in a checkpoint of its own; checkpoint the whole module, or use ColumnParallel"
            )
        if self.outputs is None:
            self.layers[0]._expect_no_tangent(self.input)
            weights = [weight for layer in self.layers for weight in layer.weights]
            biases = [bias for layer in self.layers for bias in layer.biases]
            first = self.layers[0]
            self.outputs = first._products(self.input, weights, biases)
            watch_changes(zip(self.groups()[0], weights, strict=True), self.outputs)
            if first.sequence_parallel:
                self.outputs = [self.sequence.trim(y, first.gather_dim) for y in self.outputs]
        return self.outputs[index]


class _SharedColumn(ColumnParallelLinear):
    shared: _Gather
    index: int

    def forward(self, input: Tensor) -> Any:
        # Nothing was gathered: a hook may give the linear a tensor of its own.
        if not self.sequence_parallel and self.shared.input is not None and input is not self.shared.input:
            return super().forward(input)
        return self.shared.output(self.index, input)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The linears are moved one after the other: those that were joined are joined again after the last one.
        shared = self.shared
        groups = shared.groups()
        shared.may_move = shared.may_move or all(
            are_joined(group) or any(parameter.is_meta for parameter in group) for group in groups
        )
        super()._apply(fn, recurse)
        if shared.may_move:
            shared.rejoin()
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.shared.rejoin_copy()

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

    Raises: as ColumnParallel; with sequence_parallel ValueError in forward if a linear gets another tensor. Without it
        such a linear computes by itself.
    """

    def __init__(self, *names: str, sequence_parallel: bool = True, sequence_dim: int = 1, multiple_of: int = 1,
                 argument: str = "hidden_states", **options: Any) -> None:  # fmt: skip
        super().__init__(sequence_parallel, sequence_dim, **options)
        self.names, self.multiple_of, self.argument = names, multiple_of, argument
        if not names:
            raise ValueError("SharedGather: expected the names of one or more linears, got none. Pass those that take "
                             "the module's first argument.")  # fmt: skip

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        split: dict[str, int] = {}
        for name in self.names:
            linear = self._columns(self._linear(module.get_submodule(name), name), ranks, self.multiple_of)
            split |= _split_columns(linear, f"{name}.")
        return split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        children = [(name, module.get_submodule(name)) for name in self.names]
        linears = [self._columns(self._base_linear(child, name), comm.get_size(), self.multiple_of)
                   for name, child in children]  # fmt: skip
        shared = _Gather(self._sequence(comm), self.argument)
        for index, linear in enumerate(linears):
            self._synchronize(linear, comm)
            layer = _SharedColumn.from_linear(linear, device_mesh, gather_dim=self.sequence_dim, **self.options)
            layer.shared, layer.index = shared, index
            shared.layers.append(become(linear, layer))
            self._remember(linear, comm)
        shared.rejoin()
        for (_, child), linear in zip(children, linears, strict=True):
            if child is not linear:
                split_adapters(child, self.src_data_rank)
        module.register_forward_pre_hook(shared.begin, with_kwargs=True)
        module.register_forward_hook(shared.end, always_call=True)
        return module


def split_adapters(lora: Any, src_data_rank: int | None = 0) -> None:
    """Splits the adapters of a LoRA layer whose base layer is split, or replicates those of a replicated one.

        base layer            lora_A [r, in_features]           lora_B [out_features, r]
        ColumnParallelLinear  whole                             rows are split as the base's
        RowParallelLinear     columns are split as the base's   whole

    With sequence parallelism the r features of a column-parallel layer are gathered in place of its input. Partial sums
    of a row-parallel layer are reduced over the r features, as the base's over all.
    """
    base = lora.get_base_layer()
    layout = layout_of(base)
    if layout is None or layout.mesh is None:
        return
    mesh, comm = layout.mesh, layout.comm
    is_column, is_row = isinstance(base, ColumnParallelLinear), isinstance(base, RowParallelLinear)
    for name in new_adapters(lora):
        whole = [lora.lora_A[name], lora.lora_B[name]]
        style: Style = SequenceParallel()
        is_partial = bool(layout.partial)
        if is_column or is_row:
            options = {"sequence_parallel": base.sequence_parallel,
                       "algorithm": "sequential" if base.algorithm == "sequential" else "auto"}  # fmt: skip
            if is_column:
                style = ColumnParallel(sequence_dim=base.gather_dim, gather_output=base.gather_output, **options)
            else:
                style = RowParallel(sequence_dim=base.scatter_dim, input_is_parallel=base.input_is_parallel, **options)
            is_partial = base.sequence_parallel
            style.sequence, style.src_data_rank = style._sequence_of(base, comm), src_data_rank
            style._apply(whole.pop(1 if is_column else 0), mesh)
            _split_dropout(lora, name, base, style.sequence)
        style.src_data_rank = src_data_rank
        for linear in whole:
            style._replicate(linear, mesh, is_partial=is_partial)
    if isinstance(base, _SharedColumn) and base.sequence_parallel and not vars(lora).get("_passes_rows"):
        lora.register_forward_pre_hook(base.shared.pass_rows)
        vars(lora)["_passes_rows"] = True


def _split_dropout(lora: Any, name: str, base: Any, sequence: SharedSequence) -> None:
    rank, size = base.comm.get_rank(), base.comm.get_size()

    def rows(x: Tensor) -> tuple[list[int], Any]:
        dim, shape = base.gather_dim, list(x.shape)
        shape[dim] = sequence.gathered_rows(shape[dim])
        return shape, lambda whole: sequence.own_rows(whole, dim, rank)

    def features(x: Tensor) -> tuple[list[int], Any]:
        return [*x.shape[:-1], x.size(-1) * size], lambda whole: whole.chunk(size, -1)[rank]

    if isinstance(base, ColumnParallelLinear) and base.sequence_parallel:
        split_dropout(lora, name, rows)
    elif isinstance(base, RowParallelLinear) and base.input_is_parallel:
        split_dropout(lora, name, features)
