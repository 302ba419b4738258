#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/mesh/rule.h"

namespace torch_overlap::mesh {

// Builds a rule. Internal to the planner; rule.h defines the meaning of a rule.
class RuleBuilder {
 public:
  explicit RuleBuilder(std::string op) { rule_.op = std::move(op); }

  OpRule& rule() noexcept { return rule_; }
  int32_t factor(std::string name, int64_t size, FactorKind kind = FactorKind::kParallel,
                 ReduceKind reduce = ReduceKind::kSum);
  // Returns the factors of a dimension that is one factor: none if its size is 1.
  std::vector<int32_t> dim(std::string name, int64_t size, FactorKind kind = FactorKind::kParallel,
                           ReduceKind reduce = ReduceKind::kSum);
  void input(Shape shape, std::vector<std::vector<int32_t>> dims) {
    rule_.inputs.push_back({std::move(shape), std::move(dims)});
  }
  void output(Shape shape, std::vector<std::vector<int32_t>> dims) {
    rule_.outputs.push_back({std::move(shape), std::move(dims)});
  }
  void pattern(uint64_t inputs, uint32_t kinds) { rule_.patterns.push_back({inputs, kinds}); }
  OpRule take() { return std::move(rule_); }
  // Takes the rule of an operator that moves its first input's elements.
  OpRule take_move() {
    pattern(1, kAllKinds);
    rule_.compute = Compute::kNone;
    return take();
  }

 private:
  OpRule rule_;
};

// Returns d, or d + rank if d is negative. Errors: out of range.
size_t normal_dim(std::string_view op, int64_t dim, size_t rank);
// Returns "a", "b", ... for the dimensions of a shape.
std::string dim_name(size_t dim);
// Applies torch's broadcasting. Errors: sizes that are neither equal nor 1.
Shape broadcast_shape(std::string_view op, const std::vector<Shape>& shapes);
// Returns the factors of the dimensions of `from`, which broadcasts to `to`, whose factors are
// `dims`.
std::vector<std::vector<int32_t>> broadcast_dims(const Shape& from, const Shape& to,
                                                 const std::vector<std::vector<int32_t>>& dims);

}  // namespace torch_overlap::mesh
