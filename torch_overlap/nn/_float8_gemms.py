"""Products of 8-bit matrices, with and without a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap._C import ScalingMode

_ops = torch.ops.torch_overlap
ALIGNMENT = 16  # alignment of the dimension that products sum over

Scaled = tuple[Tensor, Tensor]  # an 8-bit matrix and its scale_inv


class Plan(NamedTuple):
    """The non-tensor parameters. `dim`: the dimension along which rows are sharded; None if all ranks have all rows."""

    comm: str
    size: int
    dim: int | None
    dtype: torch.dtype
    algorithm: str
    sizes: tuple[int, ...]  # rows of each weight
    split_accumulator: bool
    mode: ScalingMode  # mode of the products with a weight
    block: int  # number of elements along k that share a scale; 0: the whole tensor
    is_training: bool

    @property
    def rowwise_mode(self) -> ScalingMode:
        """The mode of products of rows with rows: both operands cannot have blocks of 128 x 128."""
        is_2d = self.mode == ScalingMode.BLOCK_2D_SCALING
        return ScalingMode.BLOCK_1D_SCALING if is_2d else self.mode

    @property
    def fused(self) -> str:
        """The algorithm of an operator: "bulk" makes operators sequential, and overlaps them with other work."""
        return "sequential" if self.algorithm == "bulk" else self.algorithm


def product(lhs: Scaled, rhs: Scaled, dtype: torch.dtype, mode: ScalingMode, bias: Tensor | None = None, *,
            split_accumulator: bool = True) -> Tensor:  # fmt: skip
    """Computes lhs [..., k] rhs [n, k]^T + bias. Uses bfloat16, which represents every 8-bit value, if k is not aligned
    for FP8."""
    if lhs[0].size(-1) == 0:
        assert bias is None
        return torch.zeros(*lhs[0].shape[:-1], rhs[0].size(0), dtype=dtype, device=lhs[0].device)
    if lhs[0].size(-1) % ALIGNMENT != 0:
        assert bias is None
        with _no_autocast(lhs[0]):
            wide = lhs[0].to(torch.bfloat16).matmul(rhs[0].to(torch.bfloat16).t())
        return (wide * (lhs[1] * rhs[1])).to(dtype)
    return ops.gemm(
        *lhs, *rhs, bias, scaling_mode=mode, rhs_transposed=True,
        fuse_bias=bias is not None, use_split_accumulator=split_accumulator, out_dtype=dtype,
    )[0]  # fmt: skip


def _no_autocast(x: Tensor) -> torch.autocast:
    """Returns a context without autocast: it would round the dequantized values of CPU products."""
    return torch.autocast(x.device.type, enabled=False)


def all_gather_gemms(plan: Plan, x: Scaled, weights: Sequence[Scaled], biases: Sequence[Tensor | None], *,
                    split_accumulator: bool, return_gathered: bool = False) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Returns the products of all rows with each weight, and, if requested, these rows: the gathered data of x."""
    cast = [None if b is None else b.to(plan.dtype) for b in biases]
    if plan.dim is None:
        return [product(x, w, plan.dtype, plan.mode, b, split_accumulator=split_accumulator)
                for w, b in zip(weights, cast, strict=True)], x[0]  # fmt: skip
    with _no_autocast(x[0]):
        outputs, gathered, _ = _ops.scaled_all_gather_matmul(
            *x, [w[0] for w in weights], [w[1] for w in weights], cast, plan.comm, plan.size, plan.dim, plan.dtype,
            split_accumulator, plan.fused, int(plan.mode), return_gathered,
        )  # fmt: skip
    return outputs, gathered


def gemm_reduce_scatter(plan: Plan, x: Scaled, weight: Scaled, bias: Tensor | None, *,
                    split_accumulator: bool) -> Tensor:  # fmt: skip
    """Returns the sum of all ranks' products, plus the bias: this rank's rows of it, or all if plan.dim is None."""
    bias = None if bias is None else bias.to(plan.dtype)
    if plan.dim is not None:
        with _no_autocast(x[0]):
            part: Tensor = _ops.scaled_matmul_reduce_scatter(
                *x, *weight, bias, plan.comm, plan.size, plan.dim, "sum", plan.dtype, split_accumulator, plan.fused,
                int(plan.mode),
            )  # fmt: skip
        return part
    with _no_autocast(x[0]):
        total: Tensor = _ops.scaled_matmul_all_reduce(
            *x, *weight, bias, plan.comm, plan.size, "sum", plan.dtype, split_accumulator, plan.fused, int(plan.mode)
        )
    return total


def start_all_gather(plan: Plan, x: Tensor, dim: int | None) -> Tensor:
    """Starts an all_gather of x along `dim`; pass the result through `wait_tensor`."""
    gather = _ops.all_gather if plan.algorithm == "sequential" else _ops.all_gather_async
    rows: Tensor = gather(x, dim, plan.comm, plan.size)
    return rows


def bias_grad(grad: Tensor, bias_dtype: torch.dtype) -> Tensor:
    return grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype)


def materialized(grads: Sequence[Tensor | None], sizes: Sequence[int]) -> Sequence[Tensor]:
    """Returns zeros for outputs [..., size] without a gradient. At least one has a gradient."""
    used = next(g for g in grads if g is not None)
    return [used.new_zeros(*used.shape[:-1], n) if g is None else g for g, n in zip(grads, sizes, strict=True)]
