#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "torch_overlap/base/rounding.h"
#include "torch_overlap/gemm/gemm.h"

namespace torch_overlap {

constexpr int64_t kScaleBlock = 128;  // BLOCK_1D_SCALING, BLOCK_2D_SCALING
constexpr int64_t kMxBlock = 32;      // MXFP8_1D_SCALING
constexpr int64_t kMxTileRows = 128;  // swizzled scales
constexpr int64_t kMxTileBlocks = 4;

inline bool is_8_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kFloat8_e5m2;
}

// True if the rows of a matrix are contiguous and do not overlap. The strides of an empty tensor,
// and of a dimension of one element, are ignored.
inline bool has_contiguous_rows(const at::Tensor& matrix) {
  return matrix.numel() == 0 || ((matrix.size(1) == 1 || matrix.stride(1) == 1) &&
                                 (matrix.size(0) == 1 || matrix.stride(0) >= matrix.size(1)));
}

enum class Side { kLhs, kRhs };
constexpr std::string_view name_of(Side side) { return side == Side::kLhs ? "lhs" : "rhs"; }

// The orientation of an operand that is multiplied.
struct OperandView {
  at::Tensor data{};
  bool transposed = false;  // as in GemmOperand
  ScalingMode scaling = ScalingMode::NO_SCALING;
  at::Tensor scale_inv{};
  bool swizzled = false;

  bool scaled() const { return scaling != ScalingMode::NO_SCALING; }
};

// True if k is the contiguous dimension of `data` in memory.
constexpr bool is_k_major(Side side, bool transposed) { return transposed == (side == Side::kRhs); }

// Checks the operand by itself, including its scales, and returns the orientation that is
// multiplied. Throws if a required orientation is missing.
OperandView view_of(std::string_view op, Side side, const GemmOperand& operand);

// Returns a slice of the rows of op(lhs), or of the columns of op(rhs).
GemmOperand cut(std::string_view op, Side side, const OperandView& view, int64_t begin,
                int64_t length);

// Returns data * scale_inv of a scaled operand, rounded once from fp32.
at::Tensor dequantize(std::string_view op, const OperandView& operand, at::ScalarType dtype);

}  // namespace torch_overlap
