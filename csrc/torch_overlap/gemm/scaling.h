#pragma once

#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How the 8-bit values of an operand are scaled: value = data * scale_inv. The numbers are those of
// Transformer Engine's JAX extension; the modes that it does not have follow.
enum class ScalingMode : int64_t {
  NO_SCALING = 0,              // 16-, 32- or 64-bit floats
  DELAYED_TENSOR_SCALING = 1,  // one fp32 factor, from the largest values of earlier steps
  MXFP8_1D_SCALING = 2,        // a power of two (E8M0) for each 32 elements along k
  CURRENT_TENSOR_SCALING = 3,  // one fp32 factor, from this tensor
  BLOCK_1D_SCALING = 4,        // an fp32 factor for each 1 x 128 elements along k
  BLOCK_2D_SCALING = 5,        // an fp32 factor for each 128 x 128 elements
  ROW_SCALING = 6,             // an fp32 factor for each row along k
};

TORCH_OVERLAP_API std::string_view to_string(ScalingMode mode);
// A kValue error that lists the modes for a number that is none.
TORCH_OVERLAP_API ScalingMode scaling_mode(std::string_view op, int64_t value);

constexpr bool is_tensor_scaling(ScalingMode mode) {
  return mode == ScalingMode::DELAYED_TENSOR_SCALING || mode == ScalingMode::CURRENT_TENSOR_SCALING;
}

// Whether k is summed at once, so that there is a choice between fast sums and those that are
// promoted to fp32 on the way.
constexpr bool has_fast_sums(ScalingMode mode) {
  return is_tensor_scaling(mode) || mode == ScalingMode::ROW_SCALING;
}

// How many scales a row of k values has, of modes where it has its own or shares them with others.
constexpr int64_t scales_in_row(ScalingMode mode, int64_t k) {
  if (mode == ScalingMode::ROW_SCALING) return 1;
  const int64_t block = mode == ScalingMode::MXFP8_1D_SCALING ? 32 : 128;
  return (k + block - 1) / block;
}

// Of products with blocks of 128: n, and m where lhs has 1 x 128, are multiples of it.
inline constexpr int64_t kBlockScaledMultiple = 8;

}  // namespace torch_overlap
