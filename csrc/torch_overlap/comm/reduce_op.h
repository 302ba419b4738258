#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

enum class RedOpType : uint8_t { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM, AVG };

TORCH_OVERLAP_API std::string_view to_string(RedOpType type);

// The reduction of the ranks' elements. A value type: cheap to copy, immutable, comparable.
//
// bool tensors reduce logically (SUM, MAX, BOR: any; PRODUCT, MIN, BAND: all; BXOR: odd number of
// true). Complex tensors support SUM, AVG and PREMUL_SUM. AVG of integers truncates toward zero.
// PREMUL_SUM multiplies each rank's input by that rank's own factor, then sums.
class TORCH_OVERLAP_API ReduceOp {
 public:
  using Factor = std::variant<std::monostate, double, at::Tensor>;

  // Accepts any type but PREMUL_SUM, which needs a factor (the kType error explains how to pass
  // one).
  ReduceOp(RedOpType type = RedOpType::SUM);  // NOLINT: implicit, `all_reduce(x, RedOpType::MAX)`
  static ReduceOp premul_sum(double factor);
  // `factor` has one element, and the dtype and device of the reduced tensor (the real dtype if
  // that is complex). It is read when the operation runs.
  static ReduceOp premul_sum(at::Tensor factor);
  // Parses the operators' spelling: sum avg product min max band bor bxor premul_sum.
  static ReduceOp parse(std::string_view name, std::optional<double> factor = std::nullopt);

  RedOpType type() const noexcept { return type_; }
  const Factor& factor() const noexcept { return factor_; }
  bool is_bitwise() const noexcept {
    return type_ == RedOpType::BAND || type_ == RedOpType::BOR || type_ == RedOpType::BXOR;
  }

  // Equal type and equal factor; tensor factors are compared by identity, never by value.
  friend TORCH_OVERLAP_API bool operator==(const ReduceOp& a, const ReduceOp& b);
  size_t hash() const;
  std::string repr() const;

 private:
  ReduceOp(RedOpType type, Factor factor) : type_(type), factor_(std::move(factor)) {}
  RedOpType type_;
  Factor factor_;
};

}  // namespace torch_overlap
