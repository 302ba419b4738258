#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"

namespace torch_overlap::mesh {

enum class StepKind : uint8_t {
  kSlice,          // keep the own part of `dim` along `axes`; nothing is sent
  kAllGather,      // join the parts of `dim` along `axes`, its minor-most
  kAllReduce,      // reduce what is pending along `axes`
  kReduceScatter,  // reduce what is pending along `axes`, each rank keeps its part of `dim`
  kAllToAll,       // `axes` leave `from_dim`, whose parts are joined, and cut `dim`
  kPermute,        // whole local tensors change places
  kMakePartial,    // a replicated value becomes a pending one along `axes`; nothing is sent
  kCast            // replicated <-> invariant along `axes`: only the gradient's meaning changes
};

TORCH_OVERLAP_API std::string_view to_string(StepKind kind);

// One operation on every rank's local tensor. The group of a rank is mesh.group(rank, axes), whose
// order is the order of the parts.
struct TORCH_OVERLAP_API Step {
  StepKind kind = StepKind::kCast;
  AxisList axes = {};
  int64_t dim = -1;
  int64_t from_dim = -1;
  ReduceKind reduce = ReduceKind::kSum;
  // kPermute, `axes` in another order: a rank gets the tensor of the member of its group whose
  // place is its own place in the order of `sources`.
  AxisList sources = {};
  Layout before;
  Layout after;
  int64_t ranks = 1;      // in a group
  double bytes = 0;       // of the larger of a rank's input and output
  double wire_bytes = 0;  // that a rank sends
  double seconds = 0;

  bool sends() const noexcept;
  // kPermute: the index in the mesh of the rank whose tensor the one at `index` gets.
  int64_t source_at(int64_t index) const;
  std::string str() const;  // "all_gather dim 0 over [dp,tp]"
};

// How a tensor comes from one layout to another, step by step. A value.
struct TORCH_OVERLAP_API Plan {
  Layout from;
  Layout to;
  Shape shape;  // global
  int64_t element_size = 1;
  std::vector<Step> steps;

  double seconds() const noexcept;
  double wire_bytes() const noexcept;
  int64_t num_sends() const noexcept;  // steps that communicate
  // A line a step: what, over which axes, how many ranks, bytes, time, the layout afterwards.
  std::string explain() const;
};

// The cheapest way by `cost`, which is never worse than greedy_reshard(). Deterministic: equal
// inputs give equal plans on every rank. Among plans of one cost: fewer steps, then a fixed order.
//
// Every way out of a pending sum begins with a reduction; replicated to pending needs no
// communication. Where more than four axes change places, or the search would grow beyond reason,
// it is the greedy plan. Errors: layouts of two meshes; a shape that has not their rank.
TORCH_OVERLAP_API Plan plan_reshard(const Layout& from, const Layout& to, const Shape& shape,
                                    int64_t element_size, const CostModel& cost);

// plan_reshard(...).seconds(), for comparisons: no steps are written down.
TORCH_OVERLAP_API double reshard_seconds(const Layout& from, const Layout& to, const Shape& shape,
                                         int64_t element_size, const CostModel& cost);

// What one would do by hand: reduce what is pending (and scatter it where the target wants it),
// gather what is in the way, exchange single axes, slice. The baseline of plan_reshard().
TORCH_OVERLAP_API Plan greedy_reshard(const Layout& from, const Layout& to, const Shape& shape,
                                      int64_t element_size, const CostModel& cost);

// "1.5 KB", "12.3 us": for reports.
TORCH_OVERLAP_API std::string show_bytes(double bytes);
TORCH_OVERLAP_API std::string show_seconds(double seconds);

}  // namespace torch_overlap::mesh
