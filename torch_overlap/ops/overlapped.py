"""Matrix products overlapped with their collectives.

Weights are [out_features, in_features] and `x` is [..., features], as in torch.nn.functional.linear. `algorithm`:

- "sequential": the collective runs before or after the product.
- "pipelined": in pieces, each sent while another one is multiplied, forward and backward. Sums of partial products of
  8- and 16-bit floats accumulate in fp32, in rank order.
- "p2p": chunks of rows, each sent straight to its destination while others are multiplied. "bulk": backward, the gather
  and the reduction run concurrently with whole products. Both need ranks with mapped peer memory, else they raise
  UnsupportedError; operators with an all-to-all have no "bulk".
- "fused": all_gather_matmul and matmul_reduce_scatter of float16 and bfloat16 on sm_90 by dedicated kernels, which wait
  for rows, or sum received tiles while they multiply. matmul_all_reduce of at most 256 rows, and 8 MiB sent per rank,
  by one kernel that multiplies and sums; otherwise like matmul_reduce_scatter by blocks of rows, each gathered while
  the next is computed. Gradients are fused too; several 16-bit products are summed as one concatenated product.
  On ranks whose loss uses the returned gathered x, its gradient is added as a product with an identity.
- "low_latency", for few rows: the ranks access each other's memory for the operand between product and collective.
  matmul_all_reduce and matmul_reduce_scatter sum products in place in peer memory, matmul_all_reduce_rms_norm followed
  by a norm; all_gather_matmul gathers all rows by one kernel and multiplies them at once. Has the requirements of
  "p2p". Gradients of all_gather_matmul and matmul_all_reduce use "sequential".
- "auto": the fastest by shape and by the capabilities of the ranks. The same on all ranks with equal shapes; if n or k
  differ so that ranks would select different algorithms, they raise an error: name one.

"sequential" runs on any backend and device, with any dtype that torch multiplies. "pipelined" does too; its gathers and
scatters are of floating-point products. All may be captured in a CUDA graph, "p2p", "bulk", "fused" and
"low_latency" after a call of the same shape outside. torch.autocast casts the operands. Their gradients overlap in the
same way. The gradient of a bias or weight is that of this rank's rows: like that of every replicated parameter, it must
be summed over ranks that hold other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import ReduceOp, ScalingMode, TorchComm
from torch_overlap.ops._arguments import group, one_per_weight, reduction

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
    main_grads: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor]:
    """Applies several linear layers to the gathered `x`, gathered once: [linear(all_gather(x), w, b) for each w, b].

    The column-parallel layer of sequence parallelism: x is sharded by rows, the weights by output features.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weights: each [n_i, k].
        biases: none, or one entry for each weight; None stands for no bias.
        gather_dim: the dimension of rows to gather along, not the last one. 0 needs no copies.
        return_gathered: if True, returns the gathered x too. Then the backward pass does not gather it again. A
            loss may use it on some ranks only.
        algorithm: one of those above.
        main_grads: buffers to which the backward pass adds the gradients of the weights, instead of returning them:
            one for each weight, of its shape (or several, with its rows in order), contiguous, of the dtype of x or,
            for 16-bit x, float32. Their values may change between the passes. Not with create_graph, nor while a
            compiler traces.

    Returns: the products [..., n_i], and the gathered x, or an empty tensor.
    """
    weights = one_per_weight("all_gather_matmul", weights)
    return _ops.all_gather_matmul(
        x, weights, biases, *group(comm), gather_dim, return_gathered, algorithm, list(main_grads) or None
    )


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    scatter_dim: int = 0,
    op: ReduceOp | str = "sum",
    algorithm: str = "auto",
    regather: Tensor | None = None,
    main_grads: Sequence[Tensor] = (),
) -> Tensor:
    """Computes reduce_scatter(x weight^T, scatter_dim) + bias: this rank's rows of the sum of all ranks' products.

    The row-parallel layer of sequence parallelism: x and the weight are sharded by input features.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weight: [n, k].
        bias: [n], added once, after the reduction.
        scatter_dim: the dimension of rows to scatter along, divisible by the number of ranks. 0 needs no copies.
        op: "sum" or "avg".
        algorithm: one of those above.
        regather: the x of the all_gather_matmul whose backward pass comes next, on all ranks or on none, with the same
            communicator and dimension. The backward pass starts its gather beside the gradient of the weight, so that
            the next one finds it done: it then holds all ranks' rows of that x from here to there.
        main_grads: the buffer to which the backward pass adds the gradient of the weight; see `all_gather_matmul`.
    """
    return _ops.matmul_reduce_scatter(
        x, weight, bias, *group(comm), scatter_dim, reduction(op)[0], algorithm, regather, list(main_grads) or None
    )


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    op: ReduceOp | str = "sum",
    algorithm: str = "auto",
) -> Tensor:
    """Computes all_reduce(x weight^T) + bias: the sum of all ranks' products, on every rank.

    The row-parallel layer without sequence parallelism. Arguments as for `matmul_reduce_scatter`. Its gradient is
    that of `all_reduce` with grad="R".
    """
    return _ops.matmul_all_reduce(x, weight, bias, *group(comm), reduction(op)[0], algorithm)


def all_to_all_matmul(
    x: Tensor, weight: Tensor, comm: TorchComm, bias: Tensor | None = None, *, algorithm: str = "auto"
) -> Tensor:
    """Computes linear(all_to_all(x, split_dim=0, concat_dim=-1), weight, bias): exchanges heads for tokens, then
    multiplies.

    The projection after attention with sharded heads, for a result with sharded tokens.

    Args:
        x: [tokens, ..., k / size], the same shape on all ranks: all tokens, this rank's features, in rank order.
            tokens is divisible by the number of ranks; dimension 0 is outermost, others only make more rows.
        weight: [n, k], all of it on every rank.
        bias: [n].
        algorithm: "auto", "sequential", "pipelined": this rank's rows arrive in pieces, all in flight at once, and one
            is multiplied while the next arrives; or "p2p": such pieces are read straight from the other ranks' memory
            into the operand, for ranks with mapped peer memory.

    Returns: [tokens / size, ..., n], of the dtype of x.

    Gradient: of x by `matmul_all_to_all`; for that of the weight, x is exchanged once more, while that product runs.
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
    """Computes [all_to_all(linear(x, w, b), split_dim=-1, concat_dim=0) for each w, b]: multiplies, then exchanges
    tokens for heads.

    The projections before attention with sharded heads: queries, keys and values with their own numbers of heads.

    Args:
        x: [tokens / size, ..., k], the same shape on all ranks: this rank's tokens.
        weights: each [n_i, k], all of it on every rank, n_i divisible by the number of ranks.
        biases: none, or one entry [n_i] for each weight; None stands for no bias.
        algorithm: "auto", "sequential", "pipelined": computes the features of one rank after the other, and sends one
            part to its place in the result while the next is computed; or "p2p": such parts through symmetric memory.

    Returns: for each weight [tokens, ..., n_i / size], of the dtype of x: all tokens, this rank's features.

    Gradient: the results' gradients are exchanged back in pieces of rows, each while the previous product runs.
    """
    weights = one_per_weight("matmul_all_to_all", weights)
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
    """Computes linear(x, weight, bias), concurrently with an independent collective of `other`.

    Args:
        x: [..., k] with two or more dimensions, of any shape on each rank except for "auto", which uses its rows.
        weight: [n, k].
        other: the same shape on all ranks, one or more dimensions; any dtype to gather, numbers to reduce.
        bias: [n].
        collective: "all_gather" or "reduce_scatter" (the sum) of `other` along `dim`.
        dim: the dimension of the collective. 0 needs no copies.
        algorithm: "auto", "sequential", "pipelined": the communicator's own collective in the background, or "bulk":
            symmetric memory, from which each rank sums its part in rank order, 16-bit floats in fp32. To reduce by
            "bulk", `other` must be float64, float32, float16 or bfloat16.

    Returns: the product [..., n], of the dtype of x, and `all_gather(other, dim)` or `reduce_scatter(other, dim)`.

    Gradient: that of `other` is the dual collective, concurrent with the products for the gradients of x and the
    weight. torch.autocast does not cast `other`.
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
    """`all_gather_matmul` of 8-bit floats: a value is data * scale_inv. Only 8-bit data and block scales are sent.

    Args:
        x: [..., k] of float8_e4m3fn or float8_e5m2, the same shape on all ranks; k is a multiple of 16 (MXFP8: 32).
        x_scale_inv: in the layout of `quantize` for `scaling_mode`. A single scale for the tensor must be equal on all
            ranks: quantize with the largest magnitude of all. Block and row scales are this rank's own: they are
            gathered with their rows. MXFP8 scales must not be swizzled: apply `unswizzle_scales` if they are.
        weights: each [n_i, k] of float8_e4m3fn or float8_e5m2, not float8_e5m2 if x is; n_i is a multiple of 8, for
            float32 products of 4.
        weights_scale_inv: for each weight, as returned by `quantize`; this rank's own.
        biases: none, or one entry [n_i] of out_dtype for each weight; None stands for no bias.
        gather_dim: the dimension of rows to gather along, not the last one. 0 needs no copies.
        out_dtype: of the products: float32, float16 or bfloat16. Sums are float32 and are rounded once.
        use_split_accumulator: on Hopper, promotes sums to float32 during accumulation.
        algorithm: "auto", "sequential", "pipelined", "p2p" or "fused" (sm_90; one scale for each operand or row,
            16-bit out_dtype, no split accumulator).
        scaling_mode: of x and the weights. With BLOCK_2D_SCALING the weights have blocks of 128 x 128, and x those of
            BLOCK_1D_SCALING. With block scales the number of rows of x must be a multiple of 8.
        return_gathered: if True, returns the gathered x and its scales too.

    Returns: the products [..., n_i] in out_dtype; the gathered x, or an empty tensor; the scales of its rows [rows,
        blocks], or an empty tensor, also if the tensor has a single scale.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not match; nothing was sent.

    No gradient: raises if one is requested. torch.autocast casts no operand.
    """
    return _ops.scaled_all_gather_matmul(
        x,
        x_scale_inv,
        one_per_weight("scaled_all_gather_matmul", weights),
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
        x_scale_inv, weight_scale_inv: as returned by `quantize` for `scaling_mode`, not swizzled; this rank's own.
        weight: [n, k] of float8_e4m3fn or float8_e5m2, not float8_e5m2 if x is; n is a multiple of 8, for a float32
            result of 4.
        bias: [n] of out_dtype, added once, after the reduction.
        scatter_dim: the dimension of rows to scatter along, divisible by the number of ranks. 0 needs no copies.
        op: "sum" or "avg".
        out_dtype: of the partial products that are sent, and of the result: float32, float16 or bfloat16.
        use_split_accumulator, algorithm, scaling_mode: as for `scaled_all_gather_matmul`. With block scales the number
            of rows of the result must be a multiple of 8.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not match; nothing was sent.

    No gradient: raises if one is requested. torch.autocast casts no operand.
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
        use_split_accumulator, algorithm, scaling_mode: as for `scaled_all_gather_matmul`. With block scales the number
            of rows of x must be a multiple of 8.

    Raises:
        InvalidValueError, InvalidTypeError: shapes, dtypes or scales do not match; nothing was sent.

    No gradient: raises if one is requested. torch.autocast casts no operand.
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
