#include "torch_overlap/gemm/operand.h"

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/quantize.h"

namespace torch_overlap {
namespace {

void check_matrix(std::string_view op, std::string_view name, const at::Tensor& matrix) {
  TORCH_OVERLAP_CHECK(matrix.defined(), kValue, op, ": expected a matrix as ", name,
                      ", got none; pass one");
  TORCH_OVERLAP_CHECK(matrix.dim() == 2, kValue, op, ": expected ", name,
                      " of 2 dimensions, got shape ", matrix.sizes(),
                      "; collapse the dimensions before and after its axis boundary");
  TORCH_OVERLAP_CHECK(has_contiguous_rows(matrix), kValue, op, ": expected ", name,
                      " whose rows are contiguous and do not overlap, got shape ", matrix.sizes(),
                      " and strides ", matrix.strides(), "; use ", name,
                      ".contiguous(), or its transpose and the other `transposed`");
}

void check_scale(std::string_view op, Side side, const OperandView& operand) {
  const at::Tensor& scale = operand.scale_inv;
  const auto mode = to_string(operand.scaling);
  TORCH_OVERLAP_CHECK(scale.defined() && scale.numel() > 0, kValue, op, ": expected scale_inv of ",
                      name_of(side), " for ", mode,
                      ", got none (Missing inverse scaling factor); pass what its quantization "
                      "gave");
  const int64_t rows = operand.data.size(0);
  const int64_t k = operand.data.size(1);
  const bool mx = operand.scaling == ScalingMode::MXFP8_1D_SCALING;
  const auto dtype = scale.scalar_type();
  TORCH_OVERLAP_CHECK(mx ? dtype == at::kFloat8_e8m0fnu || dtype == at::kByte : dtype == at::kFloat,
                      kType, op, ": expected scale_inv of ", name_of(side), " for ", mode,
                      " of dtype ", mx ? "float8_e8m0fnu (8-bit)" : "float32", ", got ", dtype,
                      "; pass what its quantization "
                      "gave");
  if (is_tensor_scaling(operand.scaling)) {
    TORCH_OVERLAP_CHECK(scale.numel() == 1, kValue, op, ": expected scale_inv of ", name_of(side),
                        " for ", mode, " of one element, got shape ", scale.sizes(),
                        "; pass the factor of the whole tensor");
    return;
  }
  if (mx) {
    TORCH_OVERLAP_CHECK(k % kMxBlock == 0, kValue, op, ": expected k to be a multiple of ",
                        kMxBlock, " for ", mode, ", got ", k, "; pad the operands with zeros");
    if (operand.swizzled) {
      const int64_t padded = round_up(rows, kMxTileRows) * round_up(k / kMxBlock, kMxTileBlocks);
      TORCH_OVERLAP_CHECK(scale.numel() == padded && scale.is_contiguous(), kValue, op,
                          ": expected swizzled scale_inv of ", name_of(side), " of ", padded,
                          " contiguous elements for ", rows, " x ", k, " values, got shape ",
                          scale.sizes(), "; swizzle the scales of the whole operand");
      return;
    }
  }
  const int64_t scale_rows =
      operand.scaling == ScalingMode::BLOCK_2D_SCALING ? ceil_div(rows, kScaleBlock) : rows;
  const int64_t in_row = scales_per_row(operand.scaling, k);
  TORCH_OVERLAP_CHECK(scale.dim() == 2 && scale.size(0) == scale_rows && scale.size(1) == in_row,
                      kValue, op, ": expected scale_inv of ", name_of(side), " for ", mode,
                      " of shape [", scale_rows, ", ", in_row, "], got ", scale.sizes(),
                      "; pass what its quantization along k gave");
}

// True if each row has its own scales, in row order. Other scales are in tiles of 128 rows, which a
// cut must keep whole.
bool has_scales_by_row(const OperandView& view) {
  return view.scaling == ScalingMode::BLOCK_1D_SCALING ||
         view.scaling == ScalingMode::ROW_SCALING ||
         (view.scaling == ScalingMode::MXFP8_1D_SCALING && !view.swizzled);
}

}  // namespace

OperandView view_of(std::string_view op, Side side, const GemmOperand& operand) {
  const auto name = name_of(side);
  check_matrix(op, name, operand.data);
  const auto dtype = operand.data.scalar_type();
  if (operand.scaling == ScalingMode::NO_SCALING) {
    TORCH_OVERLAP_CHECK(
        dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble,
        kType, op, ": expected ", name,
        " of float64, float32, float16 or bfloat16 for NO_SCALING, got ", dtype,
        "; 8-bit operands need a scaling mode");
    TORCH_OVERLAP_CHECK(!operand.scale_inv.defined(), kValue, op, ": expected no scale_inv of ",
                        name, " for NO_SCALING, got one; name the scaling mode or leave it out");
    return {.data = operand.data, .transposed = operand.transposed};
  }
  TORCH_OVERLAP_CHECK(is_8_bit(operand.data), kType, op, ": expected ", name,
                      " of float8_e4m3fn or float8_e5m2 for ", to_string(operand.scaling), ", got ",
                      dtype, " (8-bit operands for a quantized GEMM); quantize it");
  OperandView view{.data = operand.data,
                   .transposed = operand.transposed,
                   .scaling = operand.scaling,
                   .scale_inv = operand.scale_inv,
                   .swizzled = operand.swizzled};
  if (!is_k_major(side, operand.transposed)) {
    TORCH_OVERLAP_CHECK(operand.columnwise_data.defined(), kValue, op,
                        ": expected columnwise_data of ", name,
                        ", whose rows do not run along k, "
                        "got none (",
                        name,
                        " is missing column-wise usage); quantize it with "
                        "columnwise=True");
    view.data = operand.columnwise_data;
    view.transposed = !operand.transposed;
    view.scale_inv = operand.columnwise_scale_inv;
    if (!view.scale_inv.defined() && is_tensor_scaling(operand.scaling)) {
      view.scale_inv = operand.scale_inv;
    }
    check_matrix(op, concat("columnwise_data of ", name), view.data);
    TORCH_OVERLAP_CHECK(is_8_bit(view.data) && view.data.size(0) == operand.data.size(1) &&
                            view.data.size(1) == operand.data.size(0),
                        kValue, op, ": expected columnwise_data of ", name,
                        " of 8 bits and shape [", operand.data.size(1), ", ", operand.data.size(0),
                        "], got ", view.data.scalar_type(), ' ', view.data.sizes(),
                        "; it is the transpose of its data");
    TORCH_OVERLAP_CHECK(view.data.device() == operand.data.device(), kType, op,
                        ": expected columnwise_data of ", name, " on ", operand.data.device(),
                        ", got ", view.data.device(), "; move it");
  }
  if (view.data.numel() > 0) check_scale(op, side, view);
  return view;
}

GemmOperand cut(std::string_view op, Side side, const OperandView& view, int64_t begin,
                int64_t length) {
  const int64_t dim = is_k_major(side, view.transposed) ? 0 : 1;
  const int64_t end = begin + length;
  GemmOperand part{
      .data = dim == 0 ? row_view(view.data, begin, length) : view.data.narrow(1, begin, length),
      .transposed = view.transposed,
      .scaling = view.scaling,
      .scale_inv = view.scale_inv,
      .swizzled = view.swizzled};
  if (!view.scaled() || is_tensor_scaling(view.scaling) || view.data.numel() == 0) return part;
  TORCH_OVERLAP_CHECK(
      has_scales_by_row(view) ||
          (begin % kScaleBlock == 0 && (end % kScaleBlock == 0 || end == view.data.size(0))),
      kValue, op, ": expected a cut of ", name_of(side), " at multiples of ", kScaleBlock, " for ",
      to_string(view.scaling), ", got [", begin, ", ", end, "); cut it where its blocks end");
  if (length == 0) {
    part.scale_inv = at::Tensor();
  } else if (view.scaling == ScalingMode::BLOCK_2D_SCALING) {
    part.scale_inv = row_view(view.scale_inv, begin / kScaleBlock, ceil_div(length, kScaleBlock));
  } else if (view.swizzled) {
    // Tiles of 128 rows are consecutive.
    const int64_t padded = round_up(view.data.size(0), kMxTileRows);
    part.scale_inv =
        view.scale_inv.view({padded, -1}).narrow(0, begin, round_up(length, kMxTileRows));
  } else {
    part.scale_inv = row_view(view.scale_inv, begin, length);
  }
  return part;
}

at::Tensor dequantize(std::string_view op, const OperandView& operand, at::ScalarType dtype) {
  if (operand.data.numel() == 0) return operand.data.to(dtype);
  at::Tensor scales = operand.scale_inv;
  if (operand.scaling == ScalingMode::MXFP8_1D_SCALING) {
    if (operand.swizzled) scales = scales.view({round_up(operand.data.size(0), kMxTileRows), -1});
    scales = scales.view(at::kFloat8_e8m0fnu);
  } else if (is_tensor_scaling(operand.scaling)) {
    scales = scales.reshape({1});
  }
  return dequantize(op, operand.data, scales, operand.scaling, dtype, operand.swizzled);
}

}  // namespace torch_overlap
