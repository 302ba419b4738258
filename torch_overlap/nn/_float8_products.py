"""Products of 8-bit matrices, alone and with a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap._C import ScalingMode

_ops = torch.ops.torch_overlap
ALIGNMENT = 16  # of what products run along

Scaled = tuple[Tensor, Tensor]  # a matrix in 8 bits and its scale_inv


class Plan(NamedTuple):
    """What is not a tensor. `dim`: along which rows are sharded; None: all ranks have all rows."""

    comm: str
    size: int
    dim: int | None
    dtype: torch.dtype
    algorithm: str
    sizes: tuple[int, ...]  # rows of each weight
    split_accumulator: bool
    mode: ScalingMode  # of the products with a weight
    block: int  # how many elements along k share a scale; 0: all of the tensor
    is_training: bool

    @property
    def mode_of_rows(self) -> ScalingMode:
        """Of the products of rows with rows: none are of two operands in blocks of 128 x 128."""
        is_2d = self.mode == ScalingMode.BLOCK_2D_SCALING
        return ScalingMode.BLOCK_1D_SCALING if is_2d else self.mode

    @property
    def fused(self) -> str:
        """The algorithm of an operator: "bulk" overlaps only what is around them."""
        return "sequential" if self.algorithm == "bulk" else self.algorithm


def product(lhs: Scaled, rhs: Scaled, dtype: torch.dtype, mode: ScalingMode, bias: Tensor | None = None, *,
            split_accumulator: bool = True) -> Tensor:  # fmt: skip
    """lhs [..., k] rhs [n, k]^T + bias. In bfloat16, which holds every 8-bit value, where k does not suit FP8."""
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
    """Dtypes are given: autocast would round what CPU products take for 8-bit values."""
    return torch.autocast(x.device.type, enabled=False)


def gather_products(plan: Plan, x: Scaled, weights: Sequence[Scaled], biases: Sequence[Tensor | None], *,
                    split_accumulator: bool, return_gathered: bool = False) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """The products of all rows with each weight; these rows, if asked: x's data, gathered."""
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


def product_scatter(plan: Plan, x: Scaled, weight: Scaled, bias: Tensor | None, *,
                    split_accumulator: bool) -> Tensor:  # fmt: skip
    """The sum of all ranks' products, and the bias: this rank's rows of it, or all."""
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


def begin_gather(plan: Plan, x: Tensor, dim: int | None) -> Tensor:
    """All ranks' x along `dim`, behind `wait_tensor`."""
    gather = _ops.all_gather if plan.algorithm == "sequential" else _ops.all_gather_async
    rows: Tensor = gather(x, dim, plan.comm, plan.size)
    return rows


def bias_grad(grad: Tensor, bias_dtype: torch.dtype) -> Tensor:
    return grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype)


def materialized(grads: Sequence[Tensor | None], sizes: Sequence[int]) -> Sequence[Tensor]:
    """Zeros for outputs [..., size] that were not used, but for one at least."""
    used = next(g for g in grads if g is not None)
    return [used.new_zeros(*used.shape[:-1], n) if g is None else g for g, n in zip(grads, sizes, strict=True)]
