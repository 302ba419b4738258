#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_overlap/mesh/propagate.h"

// The inside of propagate().
namespace torch_overlap::mesh {

// All strategies that go together, cheapest first. The operands were checked.
std::vector<Strategy> find_strategies(const OpRule& rule, const std::vector<Layout>& inputs,
                                      const std::vector<int64_t>& element_sizes,
                                      const CostModel& cost, const PropagateOptions& options);

// The axes of a dimension, shared out among its factors, the majors first: an axis that is larger
// than what is left of a factor is cut. What fits nowhere is left out.
std::vector<std::pair<int32_t, AxisRef>> axes_on_factors(const OpRule& rule,
                                                         const std::vector<int32_t>& dim,
                                                         const AxisList& axes);

}  // namespace torch_overlap::mesh
