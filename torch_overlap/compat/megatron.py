"""Megatron-core's layers on overlapped operators: a BackendSpecProvider.

The layers are subclasses of Megatron's, so initialization, skip_bias_add, sharded_state_dict and arguments are theirs.
Their products run as `all_gather_matmul` and `matmul_reduce_scatter` with sequence parallelism, as `matmul_all_reduce`
without. The tensor-parallel group must be of the backend "torch_overlap".
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap._c10d import comm_from_group
from torch_overlap.nn._main_grad import fusible, main_grad_of, with_main_grad
from torch_overlap.nn.functional import copy_matmul, local_shard, sum_matmul

__all__ = ["spec_provider"]


def spec_provider(algorithm: str = "auto") -> Any:
    """Returns a BackendSpecProvider of Megatron-core whose linear layers overlap communication with their products.

    Everything but the linear layers is that of Megatron's LocalSpecProvider. Expert layers, and layers whose weights
    Megatron gathers itself (GTP), compute as Megatron's. With `gradient_accumulation_fusion` gradients of weights are
    added to `main_grad` without APEX: with sequence parallelism by the product, else after it.

    Args:
        algorithm: of the operators; see torch_overlap.ops.
    """
    return _provider(algorithm)()


@functools.cache
def _provider(algorithm: str) -> Any:
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    backends: Any = importlib.import_module("megatron.core.models.backends")

    class ColumnParallelLinear(layers.ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, *args: Any, config: Any, **options: Any) -> None:
            _make(super().__init__, self, args, config, options)

        def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
            weight, main_grads = _with_main_grads(self, weight, input)
            is_split = options["sequence_parallel"] or options["allreduce_dgrad"]
            if not is_split or not _is_ours(self) or options.get("grad_output_buffer") is not None:
                options["gradient_accumulation_fusion"] = False
                result: Tensor = super()._forward_impl(input, weight, bias=bias, **options)
                return result
            comm = comm_from_group(self.tp_group, input.device)
            if options["sequence_parallel"]:
                return ops.all_gather_matmul(input, [weight], comm, [bias], algorithm=algorithm,
                                             main_grads=main_grads)[0][0]  # fmt: skip
            return copy_matmul(input, [weight], [bias], comm, algorithm)[0]

    class RowParallelLinear(layers.RowParallelLinear):  # type: ignore[misc]
        def __init__(self, *args: Any, config: Any, **options: Any) -> None:
            _make(super().__init__, self, args, config, options)

        def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
            options["gradient_accumulation_fusion"] = False
            result: Tensor = super()._forward_impl(input, _with_main_grads(self, weight, input)[0], *args, **options)
            return result

        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            if not _is_ours(self):
                result: tuple[Tensor, Tensor | None] = super().forward(input_)
                return result
            comm = comm_from_group(self.tp_group, input_.device)
            x = input_ if self.input_is_parallel else local_shard(input_, -1, comm)
            weight, main_grads = _with_main_grads(self, self.weight, x)
            if self.sequence_parallel:
                y = ops.matmul_reduce_scatter(x, weight, comm, algorithm=algorithm, main_grads=main_grads)
            else:
                y = sum_matmul(x, weight, None, comm, algorithm)
            if self.skip_bias_add:
                return y, self.bias
            return (y if self.bias is None else y + self.bias), None

    class OverlapSpecProvider(backends.LocalSpecProvider):  # type: ignore[misc]
        def column_parallel_linear(self) -> type:
            return ColumnParallelLinear

        def row_parallel_linear(self) -> type:
            return RowParallelLinear

    return OverlapSpecProvider


def _make(make: Any, layer: Any, args: tuple[Any, ...], config: Any, options: dict[str, Any]) -> None:
    """Constructs a layer of Megatron, which expects APEX for the fusion that `_with_main_grads` does instead."""
    plain = copy.copy(config)
    plain.gradient_accumulation_fusion = False
    make(*args, config=plain, **options)
    layer.config, layer.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion


def _is_ours(layer: Any) -> bool:
    return not layer.explicit_expert_comm and getattr(layer, "gtp_remat_size", 1) == 1 and layer.tp_group.size() > 1


def _with_main_grads(layer: Any, weight: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the weight, whose gradient goes to its main_grad if the layer fuses accumulation, and the operator's
    buffers."""
    if not layer.gradient_accumulation_fusion or not weight.requires_grad or not torch.is_grad_enabled():
        return weight, []
    main_grad = main_grad_of(type(layer).__name__, weight)
    return with_main_grad(weight, weight, main_grad), fusible(x, [main_grad])
