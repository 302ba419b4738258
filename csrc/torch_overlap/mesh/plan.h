#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"

namespace torch_overlap::mesh {

enum class StepKind : uint8_t {
  kSlice,          // keep this rank's part of `dim` along `axes`; nothing is sent
  kAllGather,      // concatenate the parts of `dim` along `axes`, its minor-most axes
  kAllReduce,      // reduce along the partial `axes`
  kReduceScatter,  // reduce along the partial `axes`; each rank keeps its part of `dim`
  kAllToAll,       // move `axes` from `from_dim` (concatenated) to `dim` (split)
  kPermute,        // permute whole local tensors among ranks
  kMakePartial,    // make a replicated value partial along `axes`; nothing is sent
  kCast  // replicated <-> invariant along `axes`: only the meaning of the gradient changes
};

TORCH_OVERLAP_API std::string_view to_string(StepKind kind);

// One operation on every rank's local tensor. A rank's group is mesh.group(rank, axes), in the
// order of the parts.
struct TORCH_OVERLAP_API Step {
  StepKind kind = StepKind::kCast;
  // Each one splits a dimension after the one before it, as in a layout, and is invariant as a
  // whole or not at all, before and after.
  AxisList axes = {};
  int64_t dim = -1;
  int64_t from_dim = -1;
  ReduceKind reduce = ReduceKind::kSum;
  // kPermute: `axes` in another order. A rank gets the tensor of the group member whose position is
  // the rank's own position in the order of `sources`.
  AxisList sources = {};
  Layout before;
  Layout after;
  int64_t ranks = 1;      // number of ranks in a group
  double bytes = 0;       // the larger of a rank's input and output
  double wire_bytes = 0;  // bytes that a rank sends
  double seconds = 0;

  bool sends() const noexcept;
  // kPermute: returns the mesh index of the rank whose tensor the rank at `index` gets.
  int64_t source_at(int64_t index) const;
  std::string str() const;  // "all_gather dim 0 over [dp,tp]"
};

// A conversion from one layout to another, step by step. A value.
struct TORCH_OVERLAP_API Plan {
  Layout from;
  Layout to;
  Shape shape;  // global
  int64_t element_size = 1;
  std::vector<Step> steps;

  double seconds() const noexcept;
  double wire_bytes() const noexcept;
  int64_t num_sends() const noexcept;  // steps that communicate
  // Returns one line per step: the operation, its axes, number of ranks, bytes, time and resulting
  // layout.
  std::string explain() const;
};

// Returns the cheapest plan by `cost`, which is never worse than greedy_reshard(). Deterministic:
// equal inputs give equal plans on every rank. Ties go to the plan with fewer steps, then to a
// fixed order.
//
// Every conversion out of a partial sum begins with a reduction. Replicated to partial needs no
// communication. If more than four axes move, or the search would become too large, the result is
// the greedy plan. Errors: layouts of two meshes; a shape whose rank differs from theirs.
TORCH_OVERLAP_API Plan plan_reshard(const Layout& from, const Layout& to, const Shape& shape,
                                    int64_t element_size, const CostModel& cost);

// Returns plan_reshard(...).seconds() without building the steps, for comparisons.
TORCH_OVERLAP_API double reshard_seconds(const Layout& from, const Layout& to, const Shape& shape,
                                         int64_t element_size, const CostModel& cost);

// Returns the plan that one would write by hand: reduce partial axes (and scatter them if the
// target is sharded over them), gather axes that are in the wrong place, exchange single axes,
// slice. The baseline of plan_reshard().
TORCH_OVERLAP_API Plan greedy_reshard(const Layout& from, const Layout& to, const Shape& shape,
                                      int64_t element_size, const CostModel& cost);

// Formats for reports: "1.5 KB", "12.3 us".
TORCH_OVERLAP_API std::string show_bytes(double bytes);
TORCH_OVERLAP_API std::string show_seconds(double seconds);

}  // namespace torch_overlap::mesh
