"""Matrix products fused with their collectives, which run behind each other's backs.

Weights are [out_features, in_features] and `x` is [..., features], as in torch.nn.functional.linear. `algorithm`:

- "sequential": the collective, then the product, or the other way round.
- "chunked": in pieces; the next piece travels while one is multiplied, forward and backward. Sums of partial products
  of 8- and 16-bit floats accumulate in fp32, in rank order.
- "auto": the quicker one by shape. The same on all ranks.

All run on any backend and device and may be captured in a CUDA graph. torch.autocast casts the operands. Their
gradients overlap in the same way. A bias's or weight's gradient is that of this rank's rows: like every replicated
parameter's it is to be summed over ranks that hold other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import ReduceOp, TorchComm
from torch_overlap.ops._arguments import group, reduction

_ops = torch.ops.torch_overlap


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    comm: TorchComm,
    biases: Sequence[Tensor | None] = (),
    *,
    gather_dim: int = 0,
    return_gathered: bool = False,
    algorithm: str = "auto",
) -> tuple[list[Tensor], Tensor]:
    """Several linear layers on the gathered `x`, which is gathered once: [linear(all_gather(x), w, b) for each w, b].

    The column-parallel layer of sequence parallelism: x is sharded by rows, the weights by output features.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weights: each [n_i, k].
        biases: none, or one entry for each weight; None stands for no bias.
        gather_dim: the dimension of rows to gather along, not the last one. 0 needs no copies.
        return_gathered: whether to return the gathered x too. Then the backward pass does not gather it again.

    Returns: the products [..., n_i], and the gathered x, or an empty tensor.
    """
    return _ops.all_gather_matmul(x, weights, biases, *group(comm), gather_dim, return_gathered, algorithm)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    scatter_dim: int = 0,
    op: ReduceOp | str = "sum",
    algorithm: str = "auto",
) -> Tensor:
    """reduce_scatter(x weight^T, scatter_dim) + bias: this rank's rows of the sum of all ranks' products.

    The row-parallel layer of sequence parallelism: x and the weight are sharded by input features.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weight: [n, k].
        bias: [n], added once, after the reduction.
        scatter_dim: the dimension of rows to scatter along, divisible by the number of ranks. 0 needs no copies.
        op: "sum" or "avg".
    """
    return _ops.matmul_reduce_scatter(x, weight, bias, *group(comm), scatter_dim, reduction(op)[0], algorithm)


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    op: ReduceOp | str = "sum",
    algorithm: str = "auto",
) -> Tensor:
    """all_reduce(x weight^T) + bias: the sum of all ranks' products, on every rank.

    The row-parallel layer without sequence parallelism. Arguments as for `matmul_reduce_scatter`. Its gradient is
    that of `all_reduce` with grad="R".
    """
    return _ops.matmul_all_reduce(x, weight, bias, *group(comm), reduction(op)[0], algorithm)
