#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_overlap/mesh/propagate.h"

// Implementation of propagate().
namespace torch_overlap::mesh {

// Returns all valid combinations, cheapest first. The operands must have been checked.
std::vector<Strategy> find_strategies(const OpRule& rule, const std::vector<Layout>& inputs,
                                      const std::vector<int64_t>& element_sizes,
                                      const CostModel& cost, const PropagateOptions& options);

// Distributes the axes of a dimension among its factors, major factors first. An axis that is
// larger than the rest of a factor is split. Axes that fit nowhere are left out.
std::vector<std::pair<int32_t, AxisRef>> axes_on_factors(const OpRule& rule,
                                                         const std::vector<int32_t>& dim,
                                                         const AxisList& axes);

}  // namespace torch_overlap::mesh
