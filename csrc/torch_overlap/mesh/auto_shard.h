#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/graph.h"

namespace torch_overlap::mesh {

struct AutoShardOptions {
  bool training = false;
  size_t width = 24;   // number of partial choices kept at a time (beam width)
  size_t branch = 12;  // number of strategies of one operator tried for each of them
};

// A layout of a whole graph, and its cost.
struct Alternative {
  std::string name;
  std::vector<std::string> roles;  // per node
  GraphPlan plan;
};

struct TORCH_OVERLAP_API AutoShard {
  GraphPlan plan;                         // the cheapest
  std::vector<Alternative> alternatives;  // cheapest first, then other compared plans

  // Returns a report: the choice, its margin over the alternatives, and where each spends its time.
  std::string explain(const Graph& graph) const;
};

// Chooses layouts for a graph. Inputs without a constraint are free: they get the layout that the
// first operator that consumes them needs. A beam search over the strategies of all operators keeps
// the `width` cheapest partial choices. Its result is compared with full replication, and with data
// parallelism: the first dimension of the inputs is sharded over all axes and parameters are
// replicated. Deterministic.
TORCH_OVERLAP_API AutoShard auto_shard(const Graph& graph, const CostModel& cost,
                                       const AutoShardOptions& options = {});

}  // namespace torch_overlap::mesh
