"""Matrix products with their scaling and epilogues, quantization to 8-bit floats, groups of products, gated activation.

These operators have no communicator. A product is `op(lhs) [m, k] op(rhs) [k, n]`, where op is the transpose if
requested; a linear layer is `gemm(x, None, weight, None, rhs_transposed=True)`. `scaling_mode` is a `ScalingMode` or
its number:

| mode | operands | scale_inv of an operand [rows, k] |
|---|---|---|
| NO_SCALING (0) | float32, float16, bfloat16, float64 | None |
| DELAYED_TENSOR_SCALING (1), CURRENT_TENSOR_SCALING (3) | 8-bit floats | float32, one element |
| MXFP8_1D_SCALING (2) | 8-bit floats | float8_e8m0fnu [rows, k / 32] |
| BLOCK_1D_SCALING (4) | 8-bit floats | float32 [rows, ceil(k / 128)] |
| BLOCK_2D_SCALING (5) | 8-bit floats | float32 [ceil(rows / 128), ceil(k / 128)] |
| ROW_SCALING (6) | 8-bit floats | float32 [rows, 1] |

BLOCK_2D_SCALING is for weights: in a product rhs has blocks of 128 x 128, and lhs those of BLOCK_1D_SCALING.

A value is data * scale_inv. 8-bit operands are K-major (lhs not transposed, rhs transposed), and k is a multiple of 16.
float32 products follow torch's TF32 setting. Sums are float32 (float64 for float64) and are rounded once.

Scales and dtypes that do not match raise `InvalidTypeError` or `InvalidValueError` before anything is computed. Results
are valid on the current stream; the host does not wait; all operators may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import ScalingMode

_ops = torch.ops.torch_overlap


def gemm(
    lhs: Tensor,
    lhs_scale_inv: Tensor | None,
    rhs: Tensor,
    rhs_scale_inv: Tensor | None,
    bias: Tensor | None = None,
    gelu_input: Tensor | None = None,
    aux_in: Tensor | None = None,
    *,
    lhs_swizzle: Tensor | None = None,
    rhs_swizzle: Tensor | None = None,
    workspace: Tensor | None = None,
    scaling_mode: ScalingMode | int = ScalingMode.NO_SCALING,
    comm_overlap_method: int = 0,
    comm_type: int = 0,
    comm_overlap_id: int = 0,
    lhs_axis_boundary: int = -1,
    rhs_axis_boundary: int = -1,
    aux_axis_boundary: int = -1,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    fuse_bias: bool = False,
    fuse_gelu: bool = False,
    grad: bool = False,
    use_split_accumulator: bool = False,
    scales_swizzled: bool = False,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    out_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes one product with its epilogue.

    The forward pass: GELU(op(lhs) op(rhs) + bias), each part if requested. With `grad`, a step of the backward pass:
    the product, times the derivative of GELU at `gelu_input` if `fuse_gelu`, and the gradient of a bias if `fuse_bias`.

    Args:
        lhs, rhs: any number of dimensions; those before the axis boundary are rows, the others columns.
        lhs_scale_inv, rhs_scale_inv: as in the table above.
        bias: n elements, given with fuse_bias. With grad it has the size of bias_grad, which gets its dtype; it may be
            omitted.
        gelu_input: as many elements as the output, given with fuse_gelu and grad.
        aux_in: the input of a BULK buffer's collective: this rank's rows to gather, or all rows to reduce.
        lhs_swizzle, rhs_swizzle: contiguous buffers that receive swizzled MXFP8 scales, float8_e8m0fnu or uint8 of the
            shape that swizzle_scales returns. Allocated if omitted and required. (Inductor refuses float8_e8m0fnu in a
            call that writes into its arguments: pass views as uint8.)
        workspace: bytes for the library's workspace, instead of a cached buffer.
        scaling_mode: of both operands, as in the table above.
        comm_overlap_id: of a buffer that create_comm_overlap_buffer made.
        comm_overlap_method: the method of that buffer.
        comm_type: NONE (0); RS (1): the output is this rank's rows of the sum of all ranks' products; AG (2): lhs is
            this rank's rows, and the product that of all rows. BULK leaves the product unchanged. Rows may be fewer
            than those of the buffer. Scattered rows are split along the first dimension in equal parts, rounded up: the
            last ranks may get fewer rows, or none. The gathered input, of which each rank sees only its own part, must
            have the same number of rows on all ranks; the classes accept others (set_active_tokens). AG does not
            support lhs_transposed: such a product sums over the rows of all ranks. RS does not support fuse_gelu, which
            is not linear, nor a bias gradient, of which each rank has only its part: apply both after the sum.
        lhs_axis_boundary, rhs_axis_boundary, aux_axis_boundary: the split between rows and columns of lhs, rhs and
            aux_in; negative ones count from the end.
        lhs_transposed, rhs_transposed: if True, a collapsed operand is transposed: lhs [k, m], rhs [n, k].
        fuse_bias: adds a bias, or with grad returns its gradient.
        fuse_gelu: applies the tanh form of GELU, or with grad its derivative.
        grad: selects the backward pass.
        use_split_accumulator: for 8-bit operands on Hopper, promotes sums to float32 during accumulation.
        scales_swizzled: both scale_inv of MXFP8 are swizzled.
        out_dtype: of the output. Default: that of unscaled operands; for 8-bit ones that of bias, else of gelu_input,
            else bfloat16; under autocast its dtype.
        out_scale, out_amax: for an 8-bit output, float32 of one element each: values are multiplied with out_scale; the
            largest magnitude before that is written to out_amax.

    Returns: output, the rows' dimensions of op(lhs), then the columns' of op(rhs); bias_grad, with fuse_bias and grad:
        [n], the sum over rows of the output, if fuse_gelu, else [m], the sum of op(lhs) over k; pre_gelu_out, with
        fuse_gelu and no grad: the input of GELU, of the output's shape; aux_out: the gathered lhs, or the result of
        BULK for aux_in. Those that do not exist have shape [0].

    An invalid call raises before anything is sent, and leaves a buffer unchanged, including its active tokens.

    Gradient: that of output, for unscaled operands without grad, of any order. It raises otherwise, and with a
    comm_type: all_gather_matmul, matmul_reduce_scatter and bulk_overlap_matmul have a gradient. torch.autocast casts
    unscaled operands, bias and gelu_input.
    """
    operands = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, gelu_input, aux_in)
    attributes = (
        scaling_mode,
        comm_overlap_method,
        comm_type,
        comm_overlap_id,
        lhs_axis_boundary,
        rhs_axis_boundary,
        aux_axis_boundary,
        lhs_transposed,
        rhs_transposed,
        fuse_bias,
        fuse_gelu,
        grad,
        use_split_accumulator,
        scales_swizzled,
        out_dtype,
        out_scale,
    )
    if lhs_swizzle is None and rhs_swizzle is None and workspace is None and out_amax is None:
        return _ops.gemm.default(*operands, *attributes)
    return _ops.gemm.buffers(*operands, lhs_swizzle, rhs_swizzle, workspace, *attributes, out_amax)


def grouped_gemm(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    lhs_scale_inv: Sequence[Tensor] = (),
    rhs_scale_inv: Sequence[Tensor] = (),
    *,
    scaling_mode: ScalingMode | int = ScalingMode.NO_SCALING,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    use_split_accumulator: bool = False,
    scales_swizzled: bool = False,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Computes products whose sizes the host knows, [op(lhs[i]) op(rhs[i]) + biases[i]], concurrently on several
    streams.

    Args:
        lhs, rhs: the same number of matrices, all on one device; a size may be 0. All lists may be empty.
        biases: none, or one entry for each product, [n_i]; None stands for no bias.
        lhs_scale_inv, rhs_scale_inv: none without scaling, else one for each product.

    The others as for `gemm`. Returns: the products [m_i, n_i].

    Gradient: for unscaled operands and biases, also as groups; raises for 8-bit ones.
    """
    if not (lhs or rhs or biases or lhs_scale_inv or rhs_scale_inv):
        return []  # no tensor determines the kernel's device
    return _ops.grouped_gemm(
        lhs,
        rhs,
        biases,
        lhs_scale_inv,
        rhs_scale_inv,
        scaling_mode,
        lhs_transposed,
        rhs_transposed,
        use_split_accumulator,
        scales_swizzled,
        out_dtype,
    )


def quantize(
    x: Tensor,
    scaling_mode: ScalingMode | int = ScalingMode.CURRENT_TENSOR_SCALING,
    dtype: torch.dtype | None = None,
    *,
    columnwise: bool = False,
    swizzled: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `x` as 8-bit floats, with scales from x itself, along its last dimension.

    Values beyond the range of the type, including infinity, are saturated; NaN stays NaN. A float32 scale is 1 if the
    largest magnitude is 0, infinite or NaN. An MXFP8 block with a NaN gets the scale NaN; one with an infinity gets a
    scale that keeps it infinite.

    Args:
        x: [..., cols] of float32, float16, bfloat16 or float64; the dimensions before the last are rows.
        scaling_mode: a mode of 8-bit operands. MXFP8_1D_SCALING: cols is a multiple of 32, with columnwise rows too.
        dtype: float8_e4m3fn (default) or float8_e5m2.
        columnwise: if True, also returns the transposed matrix, quantized along its own rows, for products that sum
            over the rows of x.
        swizzled: if True, MXFP8 scales are returned in the tensor cores' order.
        power_of_two: if True, float32 scales are rounded down to powers of two.

    Returns: data, the shape of x; scale_inv; columnwise_data [cols, rows]; columnwise_scale_inv, which is empty if the
        tensor has a single scale: use scale_inv. The last two have shape [0] without columnwise.

    No gradient: raises if one is requested.
    """
    return _ops.quantize(x, scaling_mode, dtype, columnwise, swizzled, power_of_two)


def quantize_delayed(
    x: Tensor, scale: Tensor, dtype: torch.dtype | None = None, *, columnwise: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `x * scale` as 8-bit floats: delayed scaling, whose scale comes from earlier steps.

    Args:
        x: as for `quantize`.
        scale: float32 of one element.
        dtype: as for `quantize`.
        columnwise: as for `quantize`.

    Returns: data; scale_inv [1] = 1 / scale; columnwise_data [cols, rows], or an empty one; amax [1], float32: the
        largest magnitude in x, for the history.
    """
    return _ops.quantize_delayed(x, scale, dtype, columnwise)


def update_scale_(
    amax_history: Tensor,
    scale: Tensor,
    dtype: torch.dtype | None = None,
    *,
    margin: int = 0,
    amax_compute: str = "max",
) -> None:
    """Updates the scale for the next step of delayed scaling, in place: largest value of dtype / amax / 2^margin.

    The scale is unchanged if amax is 0, infinite or NaN. Then the history is rotated by one: entry 0, which belongs to
    the step that ends, moves to the end, and the next step's entry is 0.

    Args:
        amax_history: float32 [length], or [length, n] for n tensors at once.
        scale: float32 [1] or [n].
        dtype: the 8-bit type: float8_e4m3fn (default) or float8_e5m2.
        margin: the scale is divided by 2^margin.
        amax_compute: "max" of the history, or its "most_recent" entry.
    """
    _ops.update_scale_(amax_history, scale, dtype, margin, amax_compute)


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    scaling_mode: ScalingMode | int = ScalingMode.CURRENT_TENSOR_SCALING,
    dtype: torch.dtype | None = None,
    *,
    swizzled: bool = False,
) -> Tensor:
    """Returns data * scale_inv in `dtype` (float32 by default), rounded once from float32. The inverse of
    `quantize`."""
    return _ops.dequantize(data, scale_inv, scaling_mode, dtype, swizzled)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Returns MXFP8 scales [rows, blocks] in the tensor cores' order, padded with zeros to multiples of 128 x 4.

    Tiles of 128 rows x 4 scales follow each other; in a tile, rows i, i + 32, i + 64 and i + 96 are adjacent. Therefore
    128 rows of the padded shape stay together. dtype: float8_e8m0fnu or uint8.
    """
    return _ops.swizzle_scales(scales)


def unswizzle_scales(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Returns the scales [rows, blocks] that `swizzle_scales` was given, without the padding."""
    return _ops.unswizzle_scales(scales, rows, blocks)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up, rounded once: the activation of gated layers (Shazeer, "GLU Variants Improve
    Transformer", 2020).

    On a GPU one kernel computes it, and one both gradients, which it writes side by side: with `gate` alone they are
    the gradient of one product with joined weights. float64 is computed by torch's operators.

    Args:
        gate: [..., features] of float32, float16, bfloat16 or float64; without `up` [..., 2 features], those of gate
            first. Views with regular strides are not copied.
        up: of the shape, dtype and device of gate.

    Returns: [..., features].

    Raises:
        InvalidTypeError: another dtype; operands that differ in dtype or device.
        InvalidValueError: shapes that differ; an odd number of features without `up`.
    """
    return _ops.swiglu(gate, up)
