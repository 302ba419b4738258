#include "torch_overlap/comm/reduce_op.h"

#include <array>
#include <functional>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

constexpr std::array<std::string_view, 9> kNames{"SUM", "PRODUCT", "MIN",        "MAX", "BAND",
                                                 "BOR", "BXOR",    "PREMUL_SUM", "AVG"};

}  // namespace

std::string_view to_string(RedOpType type) { return kNames.at(static_cast<size_t>(type)); }

ReduceOp::ReduceOp(RedOpType type) : type_(type) {
  TORCH_OVERLAP_CHECK(type != RedOpType::PREMUL_SUM, kType,
                      "ReduceOp: expected a factor for PREMUL_SUM, got none; write "
                      "ReduceOp.PREMUL_SUM(factor) with a number or a one-element tensor");
}

ReduceOp ReduceOp::premul_sum(double factor) { return {RedOpType::PREMUL_SUM, factor}; }

ReduceOp ReduceOp::premul_sum(at::Tensor factor) {
  TORCH_OVERLAP_CHECK(factor.defined() && factor.numel() == 1, kValue,
                      "ReduceOp.PREMUL_SUM: expected a tensor of one element, got ",
                      factor.defined() ? concat(factor.sizes()) : "an undefined tensor");
  return {RedOpType::PREMUL_SUM, std::move(factor)};
}

ReduceOp ReduceOp::parse(std::string_view name, std::optional<double> factor) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (to_lower(kNames[i]) != name) continue;
    const auto type = static_cast<RedOpType>(i);
    if (type != RedOpType::PREMUL_SUM) {
      TORCH_OVERLAP_CHECK(!factor, kValue, "ReduceOp: expected no factor for '", name, "', got ",
                          factor.value_or(0));
      return type;
    }
    TORCH_OVERLAP_CHECK(factor, kValue, "ReduceOp: expected a factor for 'premul_sum', got none");
    return premul_sum(*factor);
  }
  fail(ErrorKind::kValue,
       "ReduceOp: expected one of sum, avg, product, min, max, band, bor, bxor, premul_sum, got '",
       name, "'");
}

bool operator==(const ReduceOp& a, const ReduceOp& b) {
  if (a.type_ != b.type_ || a.factor_.index() != b.factor_.index()) return false;
  if (const auto* tensor = std::get_if<at::Tensor>(&a.factor_)) {
    return tensor->is_same(std::get<at::Tensor>(b.factor_));
  }
  if (const auto* number = std::get_if<double>(&a.factor_)) {
    return *number == std::get<double>(b.factor_);
  }
  return true;
}

size_t ReduceOp::hash() const {
  size_t seed = std::hash<int>()(static_cast<int>(type_));
  if (const auto* number = std::get_if<double>(&factor_)) {
    seed ^= std::hash<double>()(*number) * 31;
  } else if (const auto* tensor = std::get_if<at::Tensor>(&factor_)) {
    seed ^= std::hash<const void*>()(tensor->unsafeGetTensorImpl()) * 31;
  }
  return seed;
}

std::string ReduceOp::repr() const {
  std::string factor;
  if (const auto* number = std::get_if<double>(&factor_)) factor = concat("(", *number, ")");
  if (std::holds_alternative<at::Tensor>(factor_)) factor = "(<tensor>)";
  return concat("ReduceOp.", to_string(type_), factor);
}

}  // namespace torch_overlap
