#pragma once

#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Scaling of the 8-bit values of an operand: value = data * scale_inv. The values are those of
// Transformer Engine's JAX extension, followed by the modes that it does not have.
enum class ScalingMode : int64_t {
  NO_SCALING = 0,              // 16-, 32- or 64-bit floats
  DELAYED_TENSOR_SCALING = 1,  // one fp32 factor, from the amax of earlier steps
  MXFP8_1D_SCALING = 2,        // one power of two (E8M0) per 32 elements along k
  CURRENT_TENSOR_SCALING = 3,  // one fp32 factor, from this tensor
  BLOCK_1D_SCALING = 4,        // one fp32 factor per 1 x 128 elements along k
  BLOCK_2D_SCALING = 5,        // one fp32 factor per 128 x 128 elements
  ROW_SCALING = 6,             // one fp32 factor per row along k
};

TORCH_OVERLAP_API std::string_view to_string(ScalingMode mode);
// Throws kValue, listing the modes, if `value` is not one.
TORCH_OVERLAP_API ScalingMode scaling_mode(std::string_view op, int64_t value);

constexpr bool is_tensor_scaling(ScalingMode mode) {
  return mode == ScalingMode::DELAYED_TENSOR_SCALING || mode == ScalingMode::CURRENT_TENSOR_SCALING;
}

// True if the sum over k is not interrupted by scales, so that fast accumulation and promotion to
// fp32 are both possible.
constexpr bool supports_fast_accumulation(ScalingMode mode) {
  return is_tensor_scaling(mode) || mode == ScalingMode::ROW_SCALING;
}

// Returns the number of scales of a row of k values, for modes with scales per row or per block.
constexpr int64_t scales_per_row(ScalingMode mode, int64_t k) {
  if (mode == ScalingMode::ROW_SCALING) return 1;
  const int64_t block = mode == ScalingMode::MXFP8_1D_SCALING ? 32 : 128;
  return (k + block - 1) / block;
}

// Block-scaled GEMMs: n, and m if lhs has 1 x 128 blocks, must be multiples of this.
inline constexpr int64_t kBlockScaledMultiple = 8;

}  // namespace torch_overlap
