#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/plan.h"
#include "torch_overlap/mesh/rule.h"

namespace torch_overlap::mesh {

// The role of an axis in one run of an operator: it shards factors (several if it is split into
// parts), or its values are partial by one of the rule's patterns, or it has no role.
struct Role {
  std::vector<std::pair<int32_t, AxisRef>> factors;
  int32_t pattern = -1;
  ReduceKind kind = ReduceKind::kSum;

  friend bool operator==(const Role&, const Role&) = default;
};

// Share of the final all_reduce that a partial output is charged for: the next operator may scatter
// it instead, or add it to another partial value first.
inline constexpr double kPartialReduceShare = 0.5;

// One way to run an operator.
struct TORCH_OVERLAP_API Strategy {
  std::vector<Layout> inputs;   // layouts that the operator needs
  std::vector<Layout> outputs;  // layouts that it produces
  std::string roles;            // "dp on m, tp on k"
  double reshard = 0;           // seconds of the inputs' reshards
  double compute = 0;           // seconds of the local operator
  double after = 0;      // seconds to the wanted outputs, or a share of reducing partial ones
  double gradients = 0;  // seconds to reduce the inputs' gradients that are partial
  std::vector<AxisList> partial_gradient_axes;  // per input: the axes of that reduction

  double seconds() const noexcept { return reshard + compute + after; }
  // Training adds the backward pass: two products for each one, and every reshard once more.
  double seconds(bool training) const noexcept {
    return training ? 2 * (reshard + after) + 3 * compute + gradients : seconds();
  }
};

struct TORCH_OVERLAP_API Propagation {
  Strategy chosen;
  std::vector<Plan> plans;           // one per input, from its layout to the required one
  std::vector<Strategy> strategies;  // all compared strategies, cheapest first
  std::string rule;

  double seconds() const noexcept { return chosen.seconds(); }
  // Returns a report: the choice, the layout that each input needs, and the alternatives with their
  // times.
  std::string explain() const;
};

struct PropagateOptions {
  // Wanted layouts of the outputs. The reshard to them is charged instead of the reduction of
  // partial outputs.
  std::vector<std::optional<Layout>> wanted = {};
  // Preferred layouts of the outputs. They suggest strategies and are not charged.
  std::vector<std::optional<Layout>> suggested = {};
  // Per input: other layouts in which its value is available as well.
  std::vector<std::vector<Layout>> also = {};
  // Inputs (bit i: input i) that have no layout yet: they get the layout that the operator needs.
  uint64_t free_inputs = 0;
  // Per input: axes along which its gradient is reduced anyway, for another operator.
  std::vector<AxisList> reduced_gradient_axes = {};
  bool training = false;  // compare the times of a training step
  // Also tries axes on every factor of the rule, for a search over strategies. Otherwise only the
  // factors that operands and wanted outputs suggest are tried.
  bool explore = false;
  size_t max_strategies = 4096;
};

// Chooses how to run an operator on inputs of these layouts: the cheapest of the strategies that
// its operands suggest. Each axis shards a factor that it shards in one of them, stays partial if
// the rule allows it, or is replicated. Deterministic: ties go to the first strategy, axis by axis,
// in the order wanted outputs, inputs, partial, replicated. The layouts are always valid, and two
// axes share a factor only if they split it evenly where that is required.
//
// `element_sizes`: bytes per element of each input, then of each output. Errors: a number of
// operands that differs from the rule's, layouts of several meshes.
TORCH_OVERLAP_API Propagation propagate(const OpRule& rule, const std::vector<Layout>& inputs,
                                        const std::vector<int64_t>& element_sizes,
                                        const CostModel& cost,
                                        const PropagateOptions& options = {});

// Returns the time of the local operator if its factors are sharded by these axes.
TORCH_OVERLAP_API double local_seconds(const OpRule& rule, const std::vector<AxisList>& by_factor,
                                       const std::vector<int64_t>& element_sizes,
                                       const CostModel& cost);

}  // namespace torch_overlap::mesh
