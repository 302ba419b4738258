#include "torch_overlap/gemm/cublaslt/scales.h"

#include <ATen/ops/constant_pad_nd.h>
#include <cublasLt.h>

#include "torch_overlap/gemm/cublaslt/key.h"
#include "torch_overlap/gemm/quantize.h"

namespace torch_overlap::cublaslt {
namespace {

constexpr int64_t kScaleAlignment = 16;   // bytes
constexpr int64_t kBlockRowMultiple = 4;  // scales of 128 x 128 blocks

bool is_aligned(const at::Tensor& scales) {
  return alignment_of(scales.const_data_ptr()) >= kScaleAlignment;
}

// Returns [rows, blocks], in which the scales of one block along k are contiguous.
at::Tensor as_columns(const at::Tensor& scales) {
  const int64_t rows = scales.size(0);
  const bool in_place = (rows <= 1 || scales.stride(0) == 1) &&
                        (scales.size(1) <= 1 || scales.stride(1) == rows) && is_aligned(scales);
  return in_place ? scales : scales.t().clone(at::MemoryFormat::Contiguous).t();
}

// Returns [row blocks, blocks], row-major, with rows padded to a multiple of 4.
at::Tensor as_padded_rows(const at::Tensor& scales) {
  const int64_t blocks = scales.size(1);
  const int64_t padded = round_up(blocks, kBlockRowMultiple);
  const bool in_place = scales.stride(1) == 1 && scales.stride(0) == padded && is_aligned(scales);
  return in_place ? scales : at::constant_pad_nd(scales, {0, padded - blocks}).contiguous();
}

}  // namespace

bool supports_scaling_mode(ScalingMode mode, int major, int minor) {
  switch (mode) {
    case ScalingMode::NO_SCALING:
      return true;
    case ScalingMode::DELAYED_TENSOR_SCALING:
    case ScalingMode::CURRENT_TENSOR_SCALING:
      return major >= 9 || (major == 8 && minor == 9);
    case ScalingMode::BLOCK_1D_SCALING:
    case ScalingMode::BLOCK_2D_SCALING:
    case ScalingMode::ROW_SCALING:
      return major == 9;
    case ScalingMode::MXFP8_1D_SCALING:
      return major == 10 || major == 11;
  }
  return false;
}

int64_t scale_mode_of(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::NO_SCALING:
      return -1;
    case ScalingMode::DELAYED_TENSOR_SCALING:
    case ScalingMode::CURRENT_TENSOR_SCALING:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case ScalingMode::BLOCK_1D_SCALING:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScalingMode::BLOCK_2D_SCALING:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScalingMode::ROW_SCALING:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScalingMode::MXFP8_1D_SCALING:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  }
  return -1;
}

at::Tensor scales_in_cublaslt_layout(std::string_view op, const OperandView& operand) {
  const at::Tensor& scales = operand.scale_inv;
  switch (operand.scaling) {
    case ScalingMode::BLOCK_1D_SCALING:
      return as_columns(scales);
    case ScalingMode::BLOCK_2D_SCALING:
      return as_padded_rows(scales);
    case ScalingMode::MXFP8_1D_SCALING:
      if (!operand.swizzled) return swizzle_scales(op, scales);
      return is_aligned(scales) ? scales : scales.clone();
    case ScalingMode::ROW_SCALING:
      return scales.is_contiguous() && is_aligned(scales)
                 ? scales
                 : scales.clone(at::MemoryFormat::Contiguous);
    default:
      return scales;
  }
}

}  // namespace torch_overlap::cublaslt
