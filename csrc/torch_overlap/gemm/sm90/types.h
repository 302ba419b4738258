#pragma once

#include <c10/core/ScalarType.h>

#include "torch_overlap/gemm/sm90/kernels.h"

// Conversions from torch's types to those of the kernels.
namespace torch_overlap::sm90 {

constexpr bool is_8_bit(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2;
}

constexpr OperandType operand_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat8_e4m3fn:
      return OperandType::e4m3;
    case at::kFloat8_e5m2:
      return OperandType::e5m2;
    case at::kHalf:
      return OperandType::f16;
    default:
      return OperandType::bf16;
  }
}

constexpr ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return ElementType::f16;
    case at::kBFloat16:
      return ElementType::bf16;
    default:
      return ElementType::f32;
  }
}

// True if kernels support these types: 16-bit operands and result of one type, or 8-bit operands of
// which at most one is e5m2, into either 16-bit type.
constexpr bool supports_types(at::ScalarType lhs, at::ScalarType rhs, at::ScalarType out) {
  const bool out_is_16_bit = out == at::kBFloat16 || out == at::kHalf;
  if (is_8_bit(lhs) && is_8_bit(rhs)) {
    return out_is_16_bit && (lhs == at::kFloat8_e4m3fn || rhs == at::kFloat8_e4m3fn);
  }
  return out_is_16_bit && lhs == out && rhs == out;
}

}  // namespace torch_overlap::sm90
