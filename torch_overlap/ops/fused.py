"""Matrix products fused with their collectives, which run behind each other's backs.

Weights are [out_features, in_features] and `x` is [..., features], as in torch.nn.functional.linear. `algorithm`:

- "sequential": the collective, then the product, or the other way round.
- "chunked": in pieces; the next piece travels while one is multiplied, forward and backward. Sums of partial products
  of 8- and 16-bit floats accumulate in fp32, in rank order.
- "ring": chunks of rows, each moved straight to where it is needed while others are multiplied. "bulk": backward, the
  gathering and the reduction run beside whole products. Both need ranks that reach each other's memory, else they
  raise UnsupportedError; operators that exchange instead of gathering or reducing have no "bulk".
- "fused": all_gather_matmul and matmul_reduce_scatter of float16 and bfloat16 on sm_90 by kernels of their own, which
  wait for rows, or sum what comes while they multiply, by themselves; matmul_all_reduce of up to 256 rows, and 8 MiB
  that a rank sends, by one kernel that multiplies and sums, else as the latter by blocks of rows, each of which is
  gathered beside the next. Gradients too, but for sums of several products, which go as "ring".
- "direct", for few rows: the ranks reach into each other's memory for the operand between product and collective.
  matmul_all_reduce and matmul_reduce_scatter sum products where they lie, matmul_all_reduce_rms_norm with a norm behind
  it; all_gather_matmul gathers all rows by one kernel and multiplies them at once. Needs what "ring" needs. Gradients
  of all_gather_matmul and matmul_all_reduce go as "sequential".
- "auto": the quicker one by shape and by what the ranks can do. The same on all ranks whose shapes are alike;
  where n or k differ, ranks that would go different ways raise an error: name one.

The first two run on any backend and device. All may be captured in a CUDA graph, "ring", "bulk", "fused" and "direct"
after a call of the same shape outside. torch.autocast casts the operands. Their gradients overlap in the same way. A
bias's or weight's gradient is that of this rank's rows: like every replicated parameter's it is to be summed over ranks
that hold other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import ReduceOp, ScalingMode, TorchComm
from torch_overlap.ops._arguments import group, one_each, reduction

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
        return_gathered: whether to return the gathered x too. Then the backward pass does not gather it again. By
            "fused" a loss uses it on all ranks or on none.

    Returns: the products [..., n_i], and the gathered x, or an empty tensor.
    """
    weights = one_each("all_gather_matmul", weights)
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


def matmul_all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    algorithm: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h = residual + all_reduce(x weight^T) + bias, and rms_norm(h) * norm_weight: the end of a layer when decoding.

    "sequential" over NCCL on sm_90 with few tokens (up to 1 MiB of h, of more than four ranks 256 KiB): the sum, the
    residual and the norm are one kernel, which rounds h once. Else a kernel for the norm, or two of torch's, follows
    the sum.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weight: [n, k].
        residual: [..., n], equal on all ranks.
        norm_weight: [n], equal on all ranks.
        bias: [n], added once.
        eps: added to the mean of squares.
        algorithm: as for `matmul_all_reduce`.

    Returns: (rms_norm(h) * norm_weight, h), both [..., n] of the dtype of x, which all operands have. The norm is that
    of h as it is returned.

    Gradient: through `matmul_all_reduce` and torch's rms_norm. torch.autocast casts all operands.
    """
    return _ops.matmul_all_reduce_rms_norm(x, weight, bias, residual, norm_weight, *group(comm), eps, algorithm)


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, comm: TorchComm, bias: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """h = residual + all_reduce(x) + bias, and rms_norm(h) * weight, in one operation.

    As `matmul_all_reduce_rms_norm`, where x is what the ranks' products would be.

    Args:
        x: [..., n], the same shape on all ranks.
        residual: [..., n], equal on all ranks.
        weight: [n], of the norm, equal on all ranks.
        bias: [n], added once.
        eps: added to the mean of squares.

    Returns: (rms_norm(h) * weight, h), both [..., n] of the dtype of x, which all operands have.
    """
    return _ops.all_reduce_rms_norm(x, residual, weight, bias, *group(comm), eps)


def all_to_all_matmul(
    x: Tensor, weight: Tensor, comm: TorchComm, bias: Tensor | None = None, *, algorithm: str = "auto"
) -> Tensor:
    """linear(all_to_all(x, split_dim=0, concat_dim=-1), weight, bias): heads become tokens, and are multiplied.

    The projection behind attention whose heads are sharded, where the tokens of its result are.

    Args:
        x: [tokens, ..., k / size], the same shape on all ranks: all tokens, this rank's features, in rank order.
            tokens is divisible by the number of ranks; dimension 0 is outermost, others only make more rows.
        weight: [n, k], all of it on every rank.
        bias: [n].
        algorithm: "auto", "sequential", "chunked": this rank's rows come in pieces, all under way at once, and one is
            multiplied while the next arrives; or "ring": such pieces straight from the other ranks' memory to where
            they are multiplied, for ranks that reach each other's.

    Returns: [tokens / size, ..., n], of the dtype of x.

    Gradient: of x by `matmul_all_to_all`; for that of the weight, x is exchanged once more, behind that product.
    """
    return _ops.all_to_all_matmul(x, weight, bias, *group(comm), algorithm)


def matmul_all_to_all(
    x: Tensor,
    weights: Sequence[Tensor],
    comm: TorchComm,
    biases: Sequence[Tensor | None] = (),
    *,
    algorithm: str = "auto",
) -> list[Tensor]:
    """[all_to_all(linear(x, w, b), split_dim=-1, concat_dim=0) for each w, b]: tokens are multiplied, and become heads.

    The projections before attention whose heads are sharded: queries, keys and values with their own numbers of heads.

    Args:
        x: [tokens / size, ..., k], the same shape on all ranks: this rank's tokens.
        weights: each [n_i, k], all of it on every rank, n_i divisible by the number of ranks.
        biases: none, or one entry [n_i] for each weight; None stands for no bias.
        algorithm: "auto", "sequential", "chunked": the features of one rank after the other; one part travels, to
            where it belongs in the result, while the next is computed; or "ring": such parts through memory that the
            ranks share.

    Returns: for each weight [tokens, ..., n_i / size], of the dtype of x: all tokens, this rank's features.

    Gradient: the results' gradients are exchanged back in pieces of rows, each behind the product before.
    """
    weights = one_each("matmul_all_to_all", weights)
    return _ops.matmul_all_to_all(x, weights, biases, *group(comm), algorithm)


def bulk_overlap_matmul(
    x: Tensor,
    weight: Tensor,
    other: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    collective: str,
    dim: int = 0,
    algorithm: str = "auto",
) -> tuple[Tensor, Tensor]:
    """linear(x, weight, bias), and beside it a collective of `other`, which has nothing to do with the product.

    Args:
        x: [..., k] with two or more dimensions, of any shape on each rank but for "auto", which looks at its rows.
        weight: [n, k].
        other: the same shape on all ranks, one or more dimensions; any dtype to gather, numbers to reduce.
        bias: [n].
        collective: "all_gather" or "reduce_scatter" (the sum) of `other` along `dim`. 0 needs no copies.
        algorithm: "auto", "sequential", "chunked": the communicator's own collective in the background, or "bulk": the
            ranks' shared memory, from which each sums its part in rank order, 16-bit floats in fp32. To reduce by
            "bulk", `other` is float64, float32, float16 or bfloat16.

    Returns: the product [..., n], of the dtype of x, and `all_gather(other, dim)` or `reduce_scatter(other, dim)`.

    Gradient: that of `other` is the dual collective, beside the products that are the gradients of x and the weight.
    torch.autocast leaves `other` as it is.
    """
    return _ops.bulk_overlap_matmul(x, weight, bias, other, collective, *group(comm), dim, algorithm)


def scaled_all_gather_matmul(
    x: Tensor,
    x_scale_inv: Tensor,
    weights: Sequence[Tensor],
    weights_scale_inv: Sequence[Tensor],
    comm: TorchComm,
    biases: Sequence[Tensor | None] = (),
    *,
    gather_dim: int = 0,
    out_dtype: torch.dtype = torch.bfloat16,
    use_split_accumulator: bool = False,
    algorithm: str = "auto",
    scaling_mode: ScalingMode | int = ScalingMode.CURRENT_TENSOR_SCALING,
    return_gathered: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """`all_gather_matmul` of 8-bit floats: a value is data * scale_inv. Only 8-bit data and scales of blocks travel.

    Args:
        x: [..., k] of float8_e4m3fn or float8_e5m2, the same shape on all ranks; k is a multiple of 16 (MXFP8: 32).
        x_scale_inv: the layout that `quantize` gives for `scaling_mode`. One factor for the tensor is equal on all
            ranks: quantize with the largest magnitude of all. Scales of blocks or rows are this rank's own: each row
            has some, which are gathered with it. MXFP8's are not swizzled: `unswizzle_scales` those that are.
        weights: each [n_i, k] of float8_e4m3fn or float8_e5m2, not float8_e5m2 if x is; n_i is a multiple of 8, for
            float32 products of 4.
        weights_scale_inv: for each weight, as `quantize` gives them; this rank's own.
        biases: none, or one entry [n_i] of out_dtype for each weight; None stands for no bias.
        gather_dim: the dimension of rows to gather along, not the last one. 0 needs no copies.
        out_dtype: of the products: float32, float16 or bfloat16. Sums are float32 and are rounded once.
        use_split_accumulator: on Hopper: sums are promoted to float32 as they grow.
        algorithm: "auto", "sequential", "chunked", "ring" or "fused" (sm_90; one factor for each operand or row,
            16-bit out_dtype, no split accumulator).
        scaling_mode: of x and the weights. With BLOCK_2D_SCALING the weights have blocks of 128 x 128, and x those of
            BLOCK_1D_SCALING. Blocks: the rows of x are a multiple of 8.
        return_gathered: whether to return the gathered x and its scales too.

    Returns: the products [..., n_i] in out_dtype; the gathered x, or an empty tensor; the scales of its rows [rows,
        blocks], or an empty tensor, also where the tensor has one factor.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not fit; nothing was sent.

    No gradient: it raises when one is asked. torch.autocast leaves all operands as they are.
    """
    return _ops.scaled_all_gather_matmul(
        x,
        x_scale_inv,
        one_each("scaled_all_gather_matmul", weights),
        weights_scale_inv,
        biases,
        *group(comm),
        gather_dim,
        out_dtype,
        use_split_accumulator,
        algorithm,
        scaling_mode,
        return_gathered,
    )


def scaled_matmul_reduce_scatter(
    x: Tensor,
    x_scale_inv: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    scatter_dim: int = 0,
    op: ReduceOp | str = "sum",
    out_dtype: torch.dtype = torch.bfloat16,
    use_split_accumulator: bool = False,
    algorithm: str = "auto",
    scaling_mode: ScalingMode | int = ScalingMode.CURRENT_TENSOR_SCALING,
) -> Tensor:
    """`matmul_reduce_scatter` of 8-bit floats: a value is data * scale_inv.

    Args:
        x: [..., k] of float8_e4m3fn or float8_e5m2, the same shape on all ranks; k is a multiple of 16 (MXFP8: 32).
        x_scale_inv, weight_scale_inv: as `quantize` gives them for `scaling_mode`, not swizzled; this rank's own.
        weight: [n, k] of float8_e4m3fn or float8_e5m2, not float8_e5m2 if x is; n is a multiple of 8, for a float32
            result of 4.
        bias: [n] of out_dtype, added once, after the reduction.
        scatter_dim: the dimension of rows to scatter along, divisible by the number of ranks. 0 needs no copies.
        op: "sum" or "avg".
        out_dtype: of the partial products that travel, and of the result: float32, float16 or bfloat16.
        use_split_accumulator, algorithm, scaling_mode: as for `scaled_all_gather_matmul`. Blocks: the rows of the
            result are a multiple of 8.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not fit; nothing was sent.

    No gradient: it raises when one is asked. torch.autocast leaves all operands as they are.
    """
    return _ops.scaled_matmul_reduce_scatter(
        x,
        x_scale_inv,
        weight,
        weight_scale_inv,
        bias,
        *group(comm),
        scatter_dim,
        reduction(op)[0],
        out_dtype,
        use_split_accumulator,
        algorithm,
        scaling_mode,
    )


def scaled_matmul_all_reduce(
    x: Tensor,
    x_scale_inv: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    op: ReduceOp | str = "sum",
    out_dtype: torch.dtype = torch.bfloat16,
    use_split_accumulator: bool = False,
    algorithm: str = "auto",
    scaling_mode: ScalingMode | int = ScalingMode.CURRENT_TENSOR_SCALING,
) -> Tensor:
    """`matmul_all_reduce` of 8-bit floats: a value is data * scale_inv. The sum [..., n] is on every rank.

    Args:
        x, x_scale_inv, weight, weight_scale_inv, out_dtype, op: as for `scaled_matmul_reduce_scatter`.
        bias: [n] of out_dtype, added once, after the reduction.
        use_split_accumulator, algorithm, scaling_mode: as for `scaled_all_gather_matmul`. Blocks: the rows of x are a
            multiple of 8.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not fit; nothing was sent.

    No gradient: it raises when one is asked. torch.autocast leaves all operands as they are.
    """
    return _ops.scaled_matmul_all_reduce(
        x,
        x_scale_inv,
        weight,
        weight_scale_inv,
        bias,
        *group(comm),
        reduction(op)[0],
        out_dtype,
        use_split_accumulator,
        algorithm,
        scaling_mode,
    )
