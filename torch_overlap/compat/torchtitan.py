"""The linears of torchtitan's `tp_gemm_backend="dist_gemm"` on overlapped operators (torchtitan 0.3).

torchtitan's modules call `apply` of three classes with a process group and its name. Ours have the same arguments. The
group must be of the backend "torch_overlap". Rows are gathered and scattered along dimension 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_overlap import ops
from torch_overlap._c10d import comm_from_group
from torch_overlap.ops._arguments import group as arguments

__all__ = ["AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter", "use_overlapped_linears"]


class AllGatherLinear:
    """Gathers the rows of x, and multiplies them by the weight's rows of this rank."""

    @staticmethod
    def apply(x_shard_m: Tensor, w_shard_n: Tensor, bias_shard_n: Tensor | None, group: ProcessGroup,
              group_name: str) -> Tensor:  # fmt: skip
        """Returns [M, N/R] for x [M/R, K] and a weight [N/R, K]."""
        comm = comm_from_group(group, x_shard_m.device)
        return ops.all_gather_matmul(x_shard_m, [w_shard_n], comm, [bias_shard_n])[0][0]

    @staticmethod
    def typecheck_forward(x_shard_m: Tensor, w_shard_n: Tensor, bias_shard_n: Tensor | None, group: ProcessGroup,
                          group_name: str) -> Tensor:  # fmt: skip
        """Checks the types of spmd_types: rows of x and the weight are split, features of the result."""
        types = _Types(group)
        types.expect(0, x_shard_m, w_shard_n, bias_shard_n)
        return types.result(AllGatherLinear.apply, 1, x_shard_m, w_shard_n, bias_shard_n, group, group_name)[0]


class AllGatherLinearMulti:
    """Gathers the rows of x once, and multiplies them by two weights."""

    @staticmethod
    def apply(x_shard_m: Tensor, wa_shard_n: Tensor, wb_shard_n: Tensor, group: ProcessGroup,
              group_name: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns two of [M, N/R] for x [M/R, K] and weights [N/R, K]."""
        comm = comm_from_group(group, x_shard_m.device)
        first, second = ops.all_gather_matmul(x_shard_m, [wa_shard_n, wb_shard_n], comm)[0]
        return first, second

    @staticmethod
    def typecheck_forward(x_shard_m: Tensor, wa_shard_n: Tensor, wb_shard_n: Tensor, group: ProcessGroup,
                          group_name: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Checks the types of spmd_types as AllGatherLinear does."""
        types = _Types(group)
        types.expect(0, x_shard_m, wa_shard_n, wb_shard_n)
        first, second = types.result(AllGatherLinearMulti.apply, 1, x_shard_m, wa_shard_n, wb_shard_n, group,
                                     group_name)  # fmt: skip
        return first, second


class LinearReduceScatter:
    """Multiplies this rank's features by the weight's columns of this rank, and scatters the rows of the sum."""

    @staticmethod
    def apply(x_shard_k: Tensor, w_shard_k: Tensor, bias: Tensor | None, group: ProcessGroup,
              group_name: str) -> Tensor:  # fmt: skip
        """Returns [M/R, N] for x [M, K/R] and a weight [N, K/R]."""
        comm = comm_from_group(group, x_shard_k.device)
        if bias is not None:  # whole on every rank: its gradient is the sum over all rows
            bias = torch.ops.torch_overlap._invariant_to_replicated(bias, *arguments(comm))
        return ops.matmul_reduce_scatter(x_shard_k, w_shard_k, comm, bias)

    @staticmethod
    def typecheck_forward(x_shard_k: Tensor, w_shard_k: Tensor, bias: Tensor | None, group: ProcessGroup,
                          group_name: str) -> Tensor:  # fmt: skip
        """Checks the types of spmd_types: features of x and the weight are split, rows of the result."""
        types = _Types(group)
        types.expect(1, x_shard_k, w_shard_k)
        if bias is not None:
            types.expect(None, bias)
        return types.result(LinearReduceScatter.apply, 0, x_shard_k, w_shard_k, bias, group, group_name)[0]


class _Types:
    """Types of spmd_types along the ranks of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.spmd: Any = importlib.import_module("spmd_types")
        self.group = group

    def expect(self, dim: int | None, *tensors: Tensor | None) -> None:
        kind = self.spmd.R if dim is None else self.spmd.S(dim)
        for tensor in tensors:
            if tensor is not None:
                self.spmd.assert_type(tensor, {self.group: kind})

    def result(self, compute: Callable[..., Any], dim: int, x: Tensor, *others: Any) -> list[Tensor]:
        found = compute(x, *others)
        results = [found] if isinstance(found, Tensor) else list(found)
        for result in results:
            self.spmd.assert_type(result, {**self.spmd.get_local_type(x), self.group: self.spmd.S(dim)})
        return results


def use_overlapped_linears() -> None:
    """Makes the modules of torchtitan's "dist_gemm" use the classes of this module, in this process.

    Replaces the three names in `torchtitan.models.common.dist_gemm`, which its modules look up in each forward.
    """
    modules: Any = importlib.import_module("torchtitan.models.common.dist_gemm")
    for kind in (AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter):
        setattr(modules, kind.__name__, kind)
