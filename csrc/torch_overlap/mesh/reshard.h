#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/plan.h"

// The inside of plan_reshard(): a way from one layout to another, as a walk through small states.
namespace torch_overlap::mesh {

// At most so many axes change places in one reshard.
inline constexpr size_t kMaxAtoms = 64;

// A few atoms in order, major to minor.
struct AtomList {
  std::array<uint8_t, kMaxAtoms> ids{};
  uint8_t count = 0;

  void push_back(size_t atom) { ids[count++] = static_cast<uint8_t>(atom); }
  const uint8_t* begin() const { return ids.data(); }
  const uint8_t* end() const { return ids.data() + count; }
};

// Where each atom is: in a dimension (then at which place of it), pending, or nowhere: replicated.
struct State {
  static constexpr int8_t kReplicated = -1;
  static constexpr int8_t kPending = -2;
  std::array<int8_t, kMaxAtoms> place{};
  std::array<int8_t, kMaxAtoms> order{};
};

struct Edge {
  StepKind kind = StepKind::kSlice;
  AtomList atoms = {};
  int8_t dim = -1;
  int8_t from_dim = -1;
  AtomList sources = {};  // kPermute
  State after = {};       // kPermute
};

// One reshard. An *atom* is an axis, or the part of one, whose place differs; all that stays is
// folded into `base`. Axes of size 1 are nowhere. Lives during one call of plan_reshard().
class Reshard {
 public:
  // The layouts use parts of axes that fit together: see split_refs().
  Reshard(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size,
          const CostModel& cost);

  size_t num_atoms() const noexcept { return atoms_.size(); }
  size_t num_dims() const noexcept { return base_.size(); }
  int64_t atom_size(size_t atom) const noexcept { return atoms_[atom].size; }
  // How it is pending at the start. One collective reduces in one way.
  ReduceKind reduce_of(size_t atom) const noexcept { return reduces_[atom]; }
  const State& start() const noexcept { return start_; }
  const State& goal() const noexcept { return goal_; }
  bool is_goal(const State& state) const noexcept;
  AtomList in_dim(const State& state, size_t dim) const noexcept;
  // Do the axes that stay, and so many parts of each of theirs, cut this dimension evenly?
  bool divides(size_t dim, int64_t parts) const noexcept;

  // Of the largest local tensor.
  double bytes(const State& state) const noexcept;
  State apply(const State& state, const Edge& edge) const noexcept;
  double seconds(const Edge& edge, const State& before, const State& after) const;
  double seconds(const std::vector<Edge>& walk) const;
  // The steps of a walk, and what follows it: new pending axes, casts.
  std::vector<Step> steps(const std::vector<Edge>& walk) const;

 private:
  Layout layout(const State& state, bool is_last) const;
  Step step(const Edge& edge, const State& before, const State& after, bool is_last) const;
  const std::vector<LinkLevel>& links(const AtomList& atoms) const;
  // What a collective is charged for, and on what: padded where parts are uneven.
  double charged_bytes(const Edge& edge, const State& before, const State& after) const noexcept;

  const Layout from_;
  const Layout to_;
  const Shape shape_;
  const CostModel& cost_;
  std::vector<AxisRef> atoms_;
  std::vector<AxisList> frozen_;         // per dimension: the axes that stay in front
  std::vector<Partial> frozen_partial_;  // pending before and after
  std::vector<Partial> new_partial_;     // pending afterwards only
  std::vector<int64_t> base_;            // per dimension: its largest part under frozen_
  double element_size_;
  std::vector<ReduceKind> reduces_;  // per atom
  State start_;
  State goal_;
  mutable std::map<uint64_t, std::vector<LinkLevel>> links_;
};

// Cuts the axes of both layouts where the other one does, so that two of their parts are the same
// or share nothing. Empty: their parts do not fit together, or one would be cut in a dimension that
// it does not divide, where the parts of a part lie elsewhere. `meet` is then a layout on the way.
struct Split {
  std::optional<std::pair<Layout, Layout>> layouts;
  std::optional<Layout> meet;
};
Split split_refs(const Layout& from, const Layout& to, const Shape& shape);

std::vector<Edge> greedy_walk(const Reshard& reshard);
// Nothing where the search would be too large.
std::optional<std::vector<Edge>> cheapest_walk(const Reshard& reshard);

}  // namespace torch_overlap::mesh
