"""Styles for the `tp_plan` of Hugging Face transformers, whose own code loads and shards the weights.

    register_parallel_styles()
    config = DistributedConfig(tp_size=n, tp_plan=overlapped_plan(AutoConfig.from_pretrained(name).base_model_tp_plan))
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

Activations between the layers are whole on every rank, as with transformers' styles. With sequence parallelism use
`torch_overlap.nn.styles.plan_for`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_overlap import ops
from torch_overlap._dtensor import to_local
from torch_overlap.nn.functional import copy_matmul, local_shard, sum_matmul
from torch_overlap.nn.layout import comm_of

__all__ = ["overlapped_plan", "register_parallel_styles"]

PREFIX = "overlap_"
_WORDS = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")


def overlapped_plan(plan: Mapping[str, str]) -> dict[str, str]:
    """Returns a tp_plan with the names of our styles where there is one, and those of transformers elsewhere."""
    return {name: PREFIX + word if word in _WORDS else word for name, word in plan.items()}


def register_parallel_styles(algorithm: str = "auto") -> list[str]:
    """Registers styles named "overlap_colwise" and so on in ALL_PARALLEL_STYLES of transformers. Returns the names.

    They shard and load parameters as transformers' styles of the same name without the prefix. Their products overlap
    with the all-reduce: of a row-wise layer forward, of a column-wise layer in the backward pass. The process group
    must be of the backend "torch_overlap".

    Args:
        algorithm: of the operators; see torch_overlap.ops.
    """
    parallel: Any = importlib.import_module("transformers.distributed.tensor_parallel")

    class Column(parallel.ColwiseParallel):  # type: ignore[misc]
        def __init__(self, gathers: bool) -> None:
            super().__init__()
            self.gathers = gathers

        def install_forward(self, module: Any, mesh: Any) -> Any:
            _expect_linear(module)
            comm = comm_of(mesh)

            def forward(module: Any, input: Tensor) -> Tensor:
                weight, bias = _local(module)
                (y,) = copy_matmul(input, [weight], [bias], comm, algorithm)
                return ops.all_gather(y, comm, -1, grad="I") if self.gathers else y

            return _with_forward(module, forward)

    class Row(parallel.RowwiseParallel):  # type: ignore[misc]
        def __init__(self, splits: bool) -> None:
            super().__init__()
            self.splits = splits

        def install_forward(self, module: Any, mesh: Any) -> Any:
            _expect_linear(module)
            comm = comm_of(mesh)

            def forward(module: Any, input: Tensor) -> Tensor:
                weight, bias = _local(module)
                part = local_shard(input, -1, comm) if self.splits else input
                return sum_matmul(part, weight, bias, comm, algorithm)

            return _with_forward(module, forward)

    styles = dict(zip(_WORDS, (Column(False), Column(True), Row(False), Row(True)), strict=True))
    for word, style in styles.items():
        parallel.ALL_PARALLEL_STYLES.register(PREFIX + word, style)
    return [PREFIX + word for word in styles]


def _with_forward(module: Any, forward: Callable[[Any, Tensor], Tensor]) -> Any:
    """Makes `forward` the method of this module, and of its copies: copy.deepcopy binds a method to the copy."""
    module.forward = MethodType(forward, module)
    return module


def _expect_linear(module: nn.Module) -> None:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(f"tp_plan: expected an nn.Linear for a style of {PREFIX}*, got {type(module).__name__}. Use "
                        "transformers' style for it.")  # fmt: skip


def _local(module: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = (to_local(p) if isinstance(p, DTensor) else p for p in (module.weight, module.bias))
    return weight, bias
