#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/graph.h"

namespace torch_overlap::mesh {

struct AutoShardOptions {
  bool training = false;
  size_t width = 24;   // partial choices that are followed at a time
  size_t branch = 12;  // strategies of one operator that are tried for each
};

// A whole graph laid out in one way, and what that costs.
struct Alternative {
  std::string name;
  std::vector<std::string> roles;  // per node
  GraphPlan plan;
};

struct TORCH_OVERLAP_API AutoShard {
  GraphPlan plan;                         // the cheapest
  std::vector<Alternative> alternatives;  // the cheapest first, then others that were compared

  // Which one, by how much, over which others, and where each spends its time.
  std::string explain(const Graph& graph) const;
};

// Layouts for a graph whose inputs are free where they have no constraint: they are as the first
// operator that takes them needs them. A search over the strategies of all operators, which follows
// the `width` cheapest beginnings; then compared with everything replicated, and with the first
// dimension of the inputs sharded over all axes while parameters are whole. Deterministic.
TORCH_OVERLAP_API AutoShard auto_shard(const Graph& graph, const CostModel& cost,
                                       const AutoShardOptions& options = {});

}  // namespace torch_overlap::mesh
