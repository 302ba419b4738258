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

// What an axis does in one run of an operator: it shards factors (several where it is cut in
// parts), or its values are pending by one of the rule's patterns, or nothing.
struct Role {
  std::vector<std::pair<int32_t, AxisRef>> factors;
  int32_t pattern = -1;
  ReduceKind kind = ReduceKind::kSum;

  friend bool operator==(const Role&, const Role&) = default;
};

// What a pending output is charged of the all_reduce that would end it: whoever comes next may
// scatter instead, or add it to another pending value first.
inline constexpr double kPendingShare = 0.5;

// One way to run an operator.
struct TORCH_OVERLAP_API Strategy {
  std::vector<Layout> inputs;   // as the operator needs them
  std::vector<Layout> outputs;  // as it leaves them
  std::string roles;            // "dp on m, tp on k"
  double reshard = 0;           // seconds to bring the inputs there
  double compute = 0;           // seconds of the local operator
  double after = 0;  // seconds until the outputs are as wanted; a share of what ends pending ones
  double gradients = 0;  // seconds to reduce the inputs' gradients, where they are pending
  std::vector<AxisList> pending_gradients;  // per input, the axes of that

  double seconds() const noexcept { return reshard + compute + after; }
  // In training the backward pass comes on top: two products for one, and every move once more.
  double seconds(bool training) const noexcept {
    return training ? 2 * (reshard + after) + 3 * compute + gradients : seconds();
  }
};

struct TORCH_OVERLAP_API Propagation {
  Strategy chosen;
  std::vector<Plan> plans;           // one per input, from what it is to what is needed
  std::vector<Strategy> strategies;  // all that were compared, cheapest first
  std::string rule;

  double seconds() const noexcept { return chosen.seconds(); }
  // The choice, what each input needs, and the alternatives with their times.
  std::string explain() const;
};

struct PropagateOptions {
  // Where the outputs are wanted; then the way there counts instead of reducing what is pending.
  std::vector<std::optional<Layout>> wanted = {};
  // Where they should rather be: heard, not charged.
  std::vector<std::optional<Layout>> suggested = {};
  // Per input, other layouts in which its value is there as well.
  std::vector<std::vector<Layout>> also = {};
  // Inputs (bit i: input i) that nobody has laid out yet: they are as they are needed.
  uint64_t free_inputs = 0;
  // Per input, axes along which its gradient is reduced anyway, for another operator.
  std::vector<AxisList> reduced_gradients = {};
  bool training = false;  // compare the times of a training step
  // The factors that an axis may shard although no operand does so yet: all of the rule, for a
  // search over strategies. Otherwise only what operands and wanted outputs suggest.
  bool explore = false;
  size_t most_strategies = 4096;
};

// How to run an operator on inputs that lie so: the cheapest of the strategies that its operands
// suggest (each axis shards what it shards in one of them, stays pending if the rule lets it, or is
// replicated). Deterministic: ties go to the strategy that comes first, axis by axis, in the order
// wanted outputs, inputs, pending, replicated. Never an invalid layout, never two axes on
// one factor that do not cut it evenly where it must be even.
//
// `element_sizes`: bytes of an element of each input, then of each output. Errors: other numbers of
// operands than the rule has, layouts of several meshes.
TORCH_OVERLAP_API Propagation propagate(const OpRule& rule, const std::vector<Layout>& inputs,
                                        const std::vector<int64_t>& element_sizes,
                                        const CostModel& cost,
                                        const PropagateOptions& options = {});

// The time of the operator on its own parts when its factors are cut by these axes.
TORCH_OVERLAP_API double local_seconds(const OpRule& rule, const std::vector<AxisList>& by_factor,
                                       const std::vector<int64_t>& element_sizes,
                                       const CostModel& cost);

}  // namespace torch_overlap::mesh
