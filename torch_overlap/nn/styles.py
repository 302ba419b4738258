"""Styles for torch.distributed.tensor.parallel.parallelize_module over a mesh of backend "torch_overlap".

A plan names the model's own layers, whose code is unchanged. All parameters become DTensors of the mesh under their old
names, so optimizers, `clip_grad_norm_`, `fully_shard` and checkpoints of torch treat them as whole tensors. For a model
of [batch, sequence, features]:

    parallelize(model, mesh["tp"], {
        "layers.0": ShardInput(),  # from here on each rank has its part of the sequence
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": SharedGather("wq", "wk", "wv"),
        "layers.*.attention.wo": RowParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": SharedGather("w1", "w3"),
        "layers.*.feed_forward.w2": RowParallel(),
        "norm": SequenceParallel(),
        "output": ColumnParallel(gather_output=True),  # the embedding, which the plan does not name, is replicated
    })

Gradients are complete after backward.

`torch_overlap.mesh.shard_module` accepts the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torch_overlap._C import TorchComm
from torch_overlap.nn.functional import local_shard
from torch_overlap.nn.layout import comm_of, layout_of, replace_parameter, replicate
from torch_overlap.nn.linear import ColumnParallelLinear, RowParallelLinear
from torch_overlap.ops._arguments import group

__all__ = [
    "ColumnParallel",
    "Replicated",
    "RowParallel",
    "SequenceParallel",
    "ShardInput",
    "SharedGather",
    "comm_of",
    "parallelize",
]

_Layer = TypeVar("_Layer", bound=nn.Module)


class Style(ParallelStyle):
    """The common part: the options of the layers, and values of rank `src_data_rank` on all ranks, as in torch's
    styles."""

    def __init__(self, sequence_parallel: bool = True, sequence_dim: int = 1, **options: Any) -> None:
        super().__init__()
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.options = {"sequence_parallel": sequence_parallel, **options}

    def _linear(self, module: nn.Module, name: str = "") -> nn.Linear:
        who = type(self).__name__
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            at = f" at '{name}'" if name else ""
            raise TypeError(f"{who}: expected an nn.Linear{at}, got {type(module).__name__}; change the plan")
        return module

    def _synchronize(self, module: nn.Module, comm: TorchComm) -> None:
        """Moves the parameters to the communicator's device, with the values of rank `src_data_rank`."""
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

    def _columns(self, module: nn.Module, ranks: int, multiple_of: int, name: str = "") -> nn.Linear:
        linear = self._linear(module, name)
        if linear.out_features % (ranks * multiple_of) != 0:
            raise ValueError(
                f"{type(self).__name__}: expected out_features divisible by {ranks} ranks times {multiple_of} "
                f"(multiple_of), got {linear.out_features}; use fewer ranks"
            )
        return linear

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        """Returns the parameters of `module` that are split over `ranks` ranks: name -> dimension. Others stay whole.

        Raises: as with parallelize_module.
        """
        return {}


def _split_columns(linear: nn.Linear, prefix: str = "") -> dict[str, int]:
    return {prefix + name: 0 for name, _ in linear.named_parameters()}


def _become(module: nn.Module, layer: _Layer) -> _Layer:
    """Turns `module` into `layer`, keeping its hooks: parallelize_module ignores the module that a style returns."""
    for name, old in module.named_parameters(recurse=False):
        replace_parameter(layer, name, old)
    hooks = {name: value for name, value in vars(module).items() if "hook" in name}
    module.__dict__ = {**vars(layer), **hooks}
    module.__class__ = type(layer)
    assert isinstance(module, type(layer))
    return module


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
        return _become(module, layer)


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
        return _become(module, layer)


class SequenceParallel(Style):
    """Marks a norm, or any module without communication, that works on this rank's part of the sequence.

    The gradients of its parameters, which every rank has in full, are summed over the ranks in the backward pass. It
    serves as well for a norm of split heads (q_norm, k_norm), with and without sequence parallelism.
    """

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        self._synchronize(module, comm)
        replicate(module, comm, device_mesh, is_partial=True)
        return module


class Replicated(Style):
    """Replicates what no other style of the plan has taken: its parameters and gradients are whole on every rank.

    For modules whose input is the same on all ranks, such as an embedding before `ShardInput`. `parallelize` applies it
    last, to the whole model; in a plan for `parallelize_module` it is the entry `"": Replicated()`, at the end.
    """

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        self._synchronize(module, comm)
        replicate(module, comm, device_mesh, is_partial=False)
        return module


def parallelize(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle], *, src_data_rank: int | None = 0
) -> nn.Module:
    """Applies a plan to a model, and replicates all parameters that the plan does not name. Collective.

    Afterwards every parameter is a DTensor of `mesh`, and state_dict() has DTensors of whole tensors.

    Args:
        model: the unsharded model, the same code on all ranks.
        mesh: a mesh of one dimension of backend "torch_overlap", as `mesh["tp"]`.
        plan: module names, which may have `*`, and styles.
        src_data_rank: the rank whose values all ranks get; None: each rank keeps its own, which must be equal.

    Returns: the model.

    Raises:
        TypeError, ValueError: as the styles do; a key matches no module; a parameter that two modules share would be
            split in two ways.
    """
    paths = [name.split(".") for name, _ in model.named_modules()]
    for key in plan:
        pattern = key.split(".")
        if not any(len(path) == len(pattern) and all(map(fnmatch, path, pattern)) for path in paths):
            raise ValueError(f"parallelize: expected module names of {type(model).__name__} as the keys of the plan, "
                             f"got '{key}', which matches none. Compare it with those of named_modules().")  # fmt: skip
    parallelize_module(model, mesh, dict(plan), src_data_rank=src_data_rank)
    return parallelize_module(model, mesh, Replicated(), src_data_rank=src_data_rank)


def _first_tensor(who: str, args: tuple[Any, ...], kwargs: dict[str, Any], argument: str) -> Tensor:
    x = args[0] if args else kwargs.get(argument)
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: expected a tensor as the first argument or as '{argument}', got {type(x).__name__}; "
                        "name it with argument=...")  # fmt: skip
    return x


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, x: Tensor) -> Any:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, argument: x})


class ShardInput(Style):
    """Passes this rank's part of the module's first argument, which is whole on every rank.

    Use it where sequence parallelism begins: at the first block, since the code before it (embedding, mask) sees the
    whole sequence. The gradient is gathered, so the modules before it need no synchronization.

    Args:
        sequence_dim: the dimension to split, divisible by the number of ranks.
        argument: the name of the argument, if it is passed by name.
    """

    def __init__(self, *, sequence_dim: int = 1, argument: str = "hidden_states") -> None:
        super().__init__(sequence_dim=sequence_dim)
        self.argument = argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)

        def split(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = _first_tensor("ShardInput", args, kwargs, self.argument)
            return _with_first(args, kwargs, self.argument, local_shard(x, self.sequence_dim, comm))

        module.register_forward_pre_hook(split, with_kwargs=True)
        return module


class _Gather:
    """State that the linears of one SharedGather share during one call of their parent."""

    def __init__(self, comm: TorchComm, argument: str) -> None:
        self.comm, self.argument = comm, argument
        self.layers: list[ColumnParallelLinear] = []
        self.input: Tensor | None = None
        self.stand_in: Tensor | None = None
        self.outputs: list[Tensor] | None = None

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = _first_tensor("SharedGather", args, kwargs, self.argument)
        self.input, self.stand_in, self.outputs = x, x, None
        first = self.layers[0]
        if first.sequence_parallel:
            shape = list(x.shape)
            shape[first.gather_dim] *= group(self.comm)[1]
            # The module may read shape, dtype and device. NaN makes a result visible that reads the values anyway.
            self.stand_in = x.detach().new_full((), float("nan")).expand(shape)
        return _with_first(args, kwargs, self.argument, self.stand_in)

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
            self.outputs = self.layers[0]._products(self.input, weights, biases)
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
        shared = _Gather(comm, self.argument)
        for index, linear in enumerate(linears.values()):
            self._synchronize(linear, comm)
            layer = _SharedColumn.from_linear(linear, device_mesh, gather_dim=self.sequence_dim, **self.options)
            layer.shared, layer.index = shared, index
            shared.layers.append(_become(linear, layer))
        module.register_forward_pre_hook(shared.begin, with_kwargs=True)
        module.register_forward_hook(shared.end)
        return module
