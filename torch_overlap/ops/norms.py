"""A residual and an RMSNorm: after an all_reduce, also quantized, the end of a layer when decoding; alone and with
gradients, as layers have it in training.

After an all_reduce over NCCL on sm_90 with few tokens (at most 2 MiB of rows on two ranks, 512 KiB on up to four,
256 KiB on more) one kernel does it all. Otherwise a kernel for the norm and the quantization, or operators of torch,
follow the sum. All ranks get the same bits if all have the same residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_overlap._C import ScalingMode, TorchComm
from torch_overlap.ops._arguments import group

_ops = torch.ops.torch_overlap


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Computes h = x + residual and rms_norm(h) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization",
    2019), without communication.

        y, x = ops.add_rms_norm(attention(y), x, norm.weight, eps=1e-5)

    On a GPU one kernel computes both. A second one computes the gradient of h, to which it adds that of h by other
    ways, and parts of the weight's, which a third one adds in an order that does not depend on how blocks are
    scheduled. Rows of float32, float16 and bfloat16 whose size is a multiple of 16 bytes, up to 16384 elements; others
    by torch's operators.

    Args:
        x: [..., n] of float32, float16, bfloat16 or float64.
        residual: of the shape, dtype and device of x.
        weight: [n], of the dtype and device of x.
        eps: added to the mean of squares.

    Returns: (rms_norm(h) * weight, h), both [..., n] of the dtype of x, valid on the current stream. The norm is that
    of the returned h.

    Gradient: of any order, and in forward mode. torch.autocast casts no operand.

    Raises:
        InvalidTypeError: another dtype; operands that differ in dtype or device.
        InvalidValueError: shapes that differ; a negative eps.
    """
    return _ops.add_rms_norm(x, residual, weight, eps)


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
    next_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes h = residual + all_reduce(x weight^T) + bias, and rms_norm(h) * norm_weight: the end of a layer when
    decoding. With `next_weight`, also the product that follows.

        qkv, h = ops.matmul_all_reduce_rms_norm(heads, wo, h, norm.weight, comm, next_weight=next_wqkv)

    "sequential" over NCCL on sm_90 with few tokens runs the sum, the residual and the norm as one kernel, which rounds
    h once. Otherwise a kernel for the norm, or two of torch's, follows the sum.

    If the sum and the norm are one kernel, the kernel of the product with `next_weight` starts with it (programmatic
    dependent launch), for up to 32 rows of float16 or bfloat16, out_features in multiples of 8 and a contiguous weight:
    while the ranks exchange their sums, SMs load what their shared memory holds of the weight. Such calls run in the
    order in which they are made, whatever communicator and stream they have, as "fused" operators do: that order must
    be the same on all ranks.

    Args:
        x: [..., k] with two or more dimensions, the same shape on all ranks.
        weight: [n, k].
        residual: [..., n], equal on all ranks.
        norm_weight: [n], equal on all ranks.
        bias: [n], added once.
        eps: added to the mean of squares.
        algorithm: as for `matmul_all_reduce`.
        next_weight: [out_features, n], of this rank.

    Returns: (rms_norm(h) * norm_weight, h), both [..., n] of the dtype of x, which all operands have. The norm is that
    of the returned h. With `next_weight` the first is (rms_norm(h) * norm_weight) next_weight^T, [..., out_features].

    Gradient: through `matmul_all_reduce`, torch's rms_norm and linear. torch.autocast casts all operands.

    Raises:
        InvalidTypeError: operands that differ in dtype or device; another dtype than float16, bfloat16, float32 or
            float64.
        InvalidValueError: shapes that do not match; a negative eps.
    """
    return _ops.matmul_all_reduce_rms_norm(
        x, weight, bias, residual, norm_weight, *group(comm), eps, algorithm, next_weight
    )


def all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    next_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes h = residual + all_reduce(x) + bias, and rms_norm(h) * weight, in one operation. With `next_weight`,
    also the product that follows.

    Like `matmul_all_reduce_rms_norm`, with x in place of the ranks' products.

    Args:
        x: [..., n], the same shape on all ranks.
        residual: [..., n], equal on all ranks.
        weight: [n], of the norm, equal on all ranks.
        bias: [n], added once.
        eps: added to the mean of squares.
        next_weight: [out_features, n], of this rank.

    Returns: (rms_norm(h) * weight, h), both [..., n] of the dtype of x, which all operands have. With `next_weight` the
    first is (rms_norm(h) * weight) next_weight^T, [..., out_features].

    Gradient: through `all_reduce`, torch's rms_norm and linear. torch.autocast does not change it.

    Raises: what `matmul_all_reduce_rms_norm` raises.
    """
    return _ops.all_reduce_rms_norm(x, residual, weight, bias, *group(comm), eps, next_weight)


def all_reduce_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    scaling_mode: ScalingMode | int,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    return_norm: bool = False,
    next_weight: Tensor | None = None,
    next_weight_scale_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes h = residual + all_reduce(x) + bias, and quantizes rms_norm(h) * weight to float8_e4m3fn, in one
    operation. With `next_weight`, also the product that follows.

        y8, y_scale_inv, h, _ = ops.all_reduce_rms_norm_quantize(
            x, h, weight, comm, scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING, scale=scale)
        qkv, _, h, _ = ops.all_reduce_rms_norm_quantize(
            x, h, weight, comm, scaling_mode=ScalingMode.ROW_SCALING,
            next_weight=wqkv8, next_weight_scale_inv=wqkv_scale_inv)

    The values are those of `quantize` for the result of `all_reduce_rms_norm`, bit for bit: the normalized rows are
    rounded to the dtype of x first. The product is that of `gemm` for them: for up to 64 rows, one scale for each
    operand or each row and feature, out_features in multiples of 8 and a contiguous float8_e4m3fn weight, its kernel
    loads the weight while the ranks exchange their sums. Such calls have the same order on all ranks (see
    `matmul_all_reduce_rms_norm`).

    Args:
        x, residual, weight, bias, eps: as for `all_reduce_rms_norm`.
        scaling_mode: DELAYED_TENSOR_SCALING multiplies with `scale`; ROW_SCALING and BLOCK_1D_SCALING compute a scale
            of each row, or of each 128 elements of a row. For 16-bit x over NCCL these three are part of the kernel.
            All others of `quantize`, and other dtypes and backends, are served by an operator that follows.
        scale: float32 of one element, for DELAYED_TENSOR_SCALING only: the inverse of the scale_inv that is returned.
        return_norm: also returns the rows that were quantized.
        next_weight, next_weight_scale_inv: [out_features, n] of this rank, float8_e4m3fn or float8_e5m2, and its scales
            as `quantize` returns them for scaling_mode. With BLOCK_2D_SCALING the weight has blocks of 128 x 128, and
            the rows those of BLOCK_1D_SCALING. Sizes as for `scaled_matmul_reduce_scatter`; not for float64 x.

    Returns: (data, scale_inv, h, norm). data has the shape of x, scale_inv the layout that `quantize` documents, h and
    norm the dtype of x; norm has shape [0] without return_norm. With `next_weight`, in place of data the product
    [..., out_features] of the dtype of x.

    Raises: `InvalidValueError` if a scale is given to another mode, or missing, or shapes do not match;
    `InvalidTypeError` for dtypes that do not match. Nothing was sent.

    It has no gradient. The results are valid on the current stream, and it may be captured in a CUDA graph. vmap runs
    it once for each element of the batch.
    """
    return _ops.all_reduce_rms_norm_quantize(
        x, residual, weight, bias, scale, scaling_mode, *group(comm), eps, return_norm, next_weight,
        next_weight_scale_inv,
    )  # fmt: skip


def matmul_all_reduce_rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    comm: TorchComm,
    bias: Tensor | None = None,
    *,
    scaling_mode: ScalingMode | int,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    return_norm: bool = False,
    algorithm: str = "auto",
    next_weight: Tensor | None = None,
    next_weight_scale_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes h = residual + all_reduce(x weight^T) + bias, and quantizes rms_norm(h) * norm_weight to float8_e4m3fn.
    With `next_weight`, also the product that follows.

    Arguments as for `matmul_all_reduce_rms_norm`, and for the quantization, the next product, the results and errors as
    for `all_reduce_rms_norm_quantize`. It has no gradient, and torch.autocast does not change it.
    """
    return _ops.matmul_all_reduce_rms_norm_quantize(
        x, weight, bias, residual, norm_weight, scale, scaling_mode, *group(comm), eps, return_norm, algorithm,
        next_weight, next_weight_scale_inv,
    )  # fmt: skip
