#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/plan.h"

// Implementation of plan_reshard(): a path from one layout to another over compact states.
namespace torch_overlap::mesh {

// Maximum number of axes that move in one reshard.
inline constexpr size_t kMaxAtoms = 64;

// An ordered list of atoms, major to minor.
struct AtomList {
  std::array<uint8_t, kMaxAtoms> ids{};
  uint8_t count = 0;

  void push_back(size_t atom) { ids[count++] = static_cast<uint8_t>(atom); }
  const uint8_t* begin() const { return ids.data(); }
  const uint8_t* end() const { return ids.data() + count; }
};

// Place of each atom: a dimension (and the position in it), partial, or replicated.
struct State {
  static constexpr int8_t kReplicated = -1;
  static constexpr int8_t kPartial = -2;
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

// One reshard. An *atom* is an axis, or a part of one, whose place differs between the two layouts.
// Everything that stays is folded into the kept_ members. Axes of size 1 are ignored. Lives during
// one call of plan_reshard().
class Reshard {
 public:
  // The layouts must use parts of axes that fit together: see split_refs().
  Reshard(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size,
          const CostModel& cost);

  size_t num_atoms() const noexcept { return atoms_.size(); }
  size_t num_dims() const noexcept { return kept_sizes_.size(); }
  int64_t atom_size(size_t atom) const noexcept { return atoms_[atom].size; }
  // Returns the kind of reduction of an atom that is partial at the start. One collective has one
  // kind.
  ReduceKind reduce_of(size_t atom) const noexcept { return reduces_[atom]; }
  const State& start() const noexcept { return start_; }
  const State& goal() const noexcept { return goal_; }
  bool is_goal(const State& state) const noexcept;
  AtomList atoms_in_dim(const State& state, size_t dim) const noexcept;
  // True if the axes that stay, together with `parts` parts of each of theirs, split this dimension
  // evenly.
  bool divides(size_t dim, int64_t parts) const noexcept;

  // Returns the bytes of the largest local tensor.
  double bytes(const State& state) const noexcept;
  State apply(const State& state, const Edge& edge) const noexcept;
  double seconds(const Edge& edge, const State& before, const State& after) const;
  double seconds(const std::vector<Edge>& walk) const;
  // Returns the steps of a path, followed by new partial axes and casts.
  std::vector<Step> steps(const std::vector<Edge>& walk) const;

 private:
  Layout layout(const State& state, bool is_last) const;
  Step step(const Edge& edge, const State& before, const State& after, bool is_last) const;
  const std::vector<LinkLevel>& links(const AtomList& atoms) const;
  // Returns the bytes that a collective is charged for: padded if parts are uneven.
  double charged_bytes(const Edge& edge, const State& before, const State& after) const noexcept;

  const Layout from_;
  const Layout to_;
  const Shape shape_;
  const CostModel& cost_;
  std::vector<AxisRef> atoms_;
  std::vector<AxisList> kept_axes_;    // per dimension: the major axes that stay
  std::vector<Partial> kept_partial_;  // partial before and after
  std::vector<Partial> new_partial_;   // partial afterwards only
  std::vector<int64_t> kept_sizes_;    // per dimension: its largest part under kept_axes_
  double element_size_;
  std::vector<ReduceKind> reduces_;  // per atom
  State start_;
  State goal_;
  mutable std::map<uint64_t, std::vector<LinkLevel>> links_;
};

// Splits the axes of both layouts at each other's boundaries, so that any two of their parts are
// equal or disjoint. `layouts` is empty if their parts do not fit together, or if an axis of an
// unevenly sharded dimension would be split, because the parts of an uneven part have other
// extents. `meet` is then an intermediate layout.
struct Split {
  std::optional<std::pair<Layout, Layout>> layouts;
  std::optional<Layout> meet;
};
Split split_refs(const Layout& from, const Layout& to, const Shape& shape);

std::vector<Edge> find_greedy_path(const Reshard& reshard);
// Returns nullopt if the search would be too large.
std::optional<std::vector<Edge>> find_cheapest_path(const Reshard& reshard);

}  // namespace torch_overlap::mesh
