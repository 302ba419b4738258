#include "torch_overlap/mesh/reshard.h"

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {
namespace {

std::vector<AxisList> dims_without_unit_axes(const Layout& layout) {
  std::vector<AxisList> dims = layout.dims();
  for (AxisList& axes : dims) std::erase_if(axes, [](const AxisRef& ref) { return ref.size == 1; });
  return dims;
}

std::vector<Partial> partial_without_unit_axes(const Layout& layout) {
  std::vector<Partial> partial = layout.partial();
  std::erase_if(partial, [](const Partial& p) { return p.axis.size == 1; });
  return partial;
}

bool contains(const AxisList& list, const AxisRef& ref) {
  return std::find(list.begin(), list.end(), ref) != list.end();
}

// Merges the axes of a step if the result is invariant as a whole or not at all, as each axis of
// a step is, before and after.
AxisList merged_if_uniform(const AxisList& axes, const Layout& before, const Layout& after) {
  const auto num_invariant = std::count_if(axes.begin(), axes.end(), [&](const AxisRef& ref) {
    return contains(before.invariant(), ref) || contains(after.invariant(), ref);
  });
  return num_invariant == 0 || num_invariant == std::ssize(axes) ? merged(axes) : axes;
}

Collective collective_of(StepKind kind) {
  switch (kind) {
    case StepKind::kAllGather:
      return Collective::kAllGather;
    case StepKind::kAllReduce:
      return Collective::kAllReduce;
    case StepKind::kReduceScatter:
      return Collective::kReduceScatter;
    case StepKind::kAllToAll:
      return Collective::kAllToAll;
    default:
      return Collective::kPermute;
  }
}

}  // namespace

Reshard::Reshard(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size,
                 const CostModel& cost)
    : from_(from),
      to_(to),
      shape_(shape),
      cost_(cost),
      element_size_(static_cast<double>(element_size)) {
  const std::vector<AxisList> from_dims = dims_without_unit_axes(from);
  const std::vector<AxisList> to_dims = dims_without_unit_axes(to);
  const std::vector<Partial> from_partial = partial_without_unit_axes(from);
  const std::vector<Partial> to_partial = partial_without_unit_axes(to);
  const auto in = [](const std::vector<Partial>& list, const Partial& item) {
    return std::find(list.begin(), list.end(), item) != list.end();
  };
  for (const Partial& p : to_partial) {
    (in(from_partial, p) ? kept_partial_ : new_partial_).push_back(p);
  }
  const auto id = [&](const AxisRef& ref) {
    const auto found = std::find(atoms_.begin(), atoms_.end(), ref);
    if (found != atoms_.end()) return static_cast<size_t>(found - atoms_.begin());
    TORCH_OVERLAP_CHECK(atoms_.size() < kMaxAtoms, kUnsupported, "plan_reshard: expected at most ",
                        kMaxAtoms, " axes that change places, got more from ", from_.str(), " to ",
                        to_.str());
    atoms_.push_back(ref);
    reduces_.push_back(ReduceKind::kSum);
    return atoms_.size() - 1;
  };
  start_.place.fill(State::kReplicated);
  goal_.place.fill(State::kReplicated);
  kept_axes_.resize(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    const AxisList& a = from_dims[d];
    const AxisList& b = to_dims[d];
    size_t same = 0;
    while (same < a.size() && same < b.size() && a[same] == b[same]) ++same;
    kept_axes_[d].assign(a.begin(), a.begin() + static_cast<int64_t>(same));
    kept_sizes_.push_back(largest_chunk(shape[d], kept_axes_[d]));
    const auto place = [&](State& state, const AxisList& list) {
      for (size_t i = same; i < list.size(); ++i) {
        const size_t atom = id(list[i]);
        state.place[atom] = static_cast<int8_t>(d);
        state.order[atom] = static_cast<int8_t>(i - same);
      }
    };
    place(start_, a);
    place(goal_, b);
  }
  for (const Partial& p : from_partial) {
    if (in(kept_partial_, p)) continue;
    const size_t atom = id(p.axis);
    start_.place[atom] = State::kPartial;
    reduces_[atom] = p.kind;
  }
}

bool Reshard::is_goal(const State& state) const noexcept {
  for (size_t i = 0; i < atoms_.size(); ++i) {
    if (state.place[i] != goal_.place[i]) return false;
    if (state.place[i] >= 0 && state.order[i] != goal_.order[i]) return false;
  }
  return true;
}

AtomList Reshard::atoms_in_dim(const State& state, size_t dim) const noexcept {
  AtomList out;
  for (size_t i = 0; i < atoms_.size(); ++i) {
    if (state.place[i] == static_cast<int8_t>(dim)) ++out.count;
  }
  for (size_t i = 0; i < atoms_.size(); ++i) {
    if (state.place[i] == static_cast<int8_t>(dim)) {
      out.ids[static_cast<size_t>(state.order[i])] = static_cast<uint8_t>(i);
    }
  }
  return out;
}

bool Reshard::divides(size_t dim, int64_t parts) const noexcept {
  return shape_[dim] % (size_of(kept_axes_[dim]) * parts) == 0;
}

double Reshard::bytes(const State& state) const noexcept {
  double out = element_size_;
  for (size_t d = 0; d < kept_sizes_.size(); ++d) {
    int64_t size = kept_sizes_[d];
    for (const uint8_t atom : atoms_in_dim(state, d))
      size = (size + atoms_[atom].size - 1) / atoms_[atom].size;
    out *= static_cast<double>(size);
  }
  return out;
}

State Reshard::apply(const State& state, const Edge& edge) const noexcept {
  if (edge.kind == StepKind::kPermute) return edge.after;
  State next = state;
  const bool leaves = edge.kind == StepKind::kAllGather || edge.kind == StepKind::kAllReduce;
  int8_t at = leaves
                  ? int8_t{0}
                  : static_cast<int8_t>(atoms_in_dim(state, static_cast<size_t>(edge.dim)).count);
  for (const uint8_t atom : edge.atoms) {
    next.place[atom] = leaves ? State::kReplicated : edge.dim;
    next.order[atom] = leaves ? int8_t{0} : at++;
  }
  return next;
}

const std::vector<LinkLevel>& Reshard::links(const AtomList& atoms) const {
  uint64_t mask = 0;
  for (const uint8_t atom : atoms) mask |= uint64_t{1} << atom;
  const auto found = links_.find(mask);
  if (found != links_.end()) return found->second;
  AxisList axes;
  for (const uint8_t atom : atoms) axes.push_back(atoms_[atom]);
  return links_.emplace(mask, from_.mesh().links(axes)).first->second;
}

double Reshard::charged_bytes(const Edge& edge, const State& before,
                              const State& after) const noexcept {
  double ranks = 1;
  for (const uint8_t atom : edge.atoms) ranks *= static_cast<double>(atoms_[atom].size);
  switch (edge.kind) {
    case StepKind::kAllGather:
      return bytes(before) * ranks;
    case StepKind::kReduceScatter:
      return bytes(after) * ranks;
    default:
      return bytes(before);
  }
}

double Reshard::seconds(const Edge& edge, const State& before, const State& after) const {
  if (edge.kind == StepKind::kSlice) return 0;
  return cost_.collective(collective_of(edge.kind), links(edge.atoms),
                          charged_bytes(edge, before, after));
}

double Reshard::seconds(const std::vector<Edge>& walk) const {
  double sum = 0;
  State state = start_;
  for (const Edge& edge : walk) {
    const State next = apply(state, edge);
    sum += seconds(edge, state, next);
    state = next;
  }
  return sum;
}

Layout Reshard::layout(const State& state, bool is_last) const {
  std::vector<AxisList> dims = kept_axes_;
  std::vector<Partial> partial = kept_partial_;
  for (size_t d = 0; d < dims.size(); ++d) {
    for (const uint8_t atom : atoms_in_dim(state, d)) dims[d].push_back(atoms_[atom]);
  }
  for (size_t i = 0; i < atoms_.size(); ++i) {
    if (state.place[i] == State::kPartial) partial.push_back({atoms_[i], reduces_[i]});
  }
  // An axis that was invariant at the start stays invariant while it is replicated. An axis that
  // becomes replicated on the way takes the state that the target gives it.
  const Layout plain(from_.mesh(), dims, partial);
  AxisList invariant;
  for (const AxisRef& ref : from_.invariant()) {
    if (!plain.uses(ref) && (!is_last || !to_.uses(ref))) invariant.push_back(ref);
  }
  for (const AxisRef& ref : to_.invariant()) {
    const auto shares = [&](const AxisRef& other) { return overlap(ref, other); };
    if (from_.uses(ref) && !plain.uses(ref) &&
        std::none_of(invariant.begin(), invariant.end(), shares)) {
      invariant.push_back(ref);
    }
  }
  return plain.with_invariant(std::move(invariant));
}

Step Reshard::step(const Edge& edge, const State& before, const State& after, bool is_last) const {
  Step out{.kind = edge.kind,
           .dim = edge.dim,
           .from_dim = edge.from_dim,
           .before = layout(before, false),
           .after = layout(after, is_last)};
  for (const uint8_t atom : edge.atoms) out.axes.push_back(atoms_[atom]);
  for (const uint8_t atom : edge.sources) out.sources.push_back(atoms_[atom]);
  for (const uint8_t atom : edge.atoms) out.reduce = reduces_[atom];
  out.ranks = size_of(out.axes);
  const auto splits_evenly = [&](int8_t dim) {
    const auto d = static_cast<size_t>(dim);
    return dim < 0 ||
           (is_even(shape_[d], out.before.dims()[d]) && is_even(shape_[d], out.after.dims()[d]));
  };
  if (edge.kind != StepKind::kPermute && splits_evenly(edge.dim) && splits_evenly(edge.from_dim)) {
    out.axes = merged_if_uniform(out.axes, out.before, out.after);
  }
  out.bytes = charged_bytes(edge, before, after);
  if (edge.kind != StepKind::kSlice) {
    out.wire_bytes = mesh::wire_bytes(collective_of(edge.kind), out.ranks, out.bytes);
  }
  out.seconds = seconds(edge, before, after);
  return out;
}

std::vector<Step> Reshard::steps(const std::vector<Edge>& walk) const {
  std::vector<Step> out;
  State state = start_;
  for (const Edge& edge : walk) {
    const State next = apply(state, edge);
    out.push_back(step(edge, state, next, false));
    state = next;
  }
  Layout last = layout(state, false);
  // New partial axes are added one kind after the other.
  for (size_t i = 0; i < new_partial_.size(); ++i) {
    const ReduceKind kind = new_partial_[i].kind;
    const auto has_reduce_kind = [&](const Partial& p) { return p.kind == kind; };
    const auto begin = new_partial_.begin();
    if (std::any_of(begin, begin + static_cast<int64_t>(i), has_reduce_kind)) continue;
    std::vector<Partial> partial = last.partial();
    AxisList invariant = last.invariant();
    AxisList axes;
    for (const Partial& p : new_partial_) {
      if (p.kind != kind) continue;
      partial.push_back(p);
      axes.push_back(p.axis);
      std::erase_if(invariant, [&](const AxisRef& ref) { return overlap(ref, p.axis); });
    }
    const Layout after(last.mesh(), last.dims(), partial, invariant);
    out.push_back({.kind = StepKind::kMakePartial,
                   .axes = merged_if_uniform(axes, last, after),
                   .reduce = kind,
                   .before = last,
                   .after = after,
                   .ranks = size_of(axes),
                   .bytes = bytes(state)});
    last = after;
  }
  if (last.invariant() != to_.invariant()) {
    AxisList changed;
    for (const AxisRef& ref : last.invariant()) {
      if (!contains(to_.invariant(), ref)) changed.push_back(ref);
    }
    for (const AxisRef& ref : to_.invariant()) {
      if (!contains(last.invariant(), ref)) changed.push_back(ref);
    }
    out.push_back({.kind = StepKind::kCast,
                   .axes = changed,
                   .before = last,
                   .after = last.with_invariant(to_.invariant()),
                   .ranks = size_of(changed),
                   .bytes = bytes(state)});
  }
  if (!out.empty()) out.back().after = to_;
  return out;
}

// --- Parts of axes ------------------------------------------------------------------------------

namespace {

// Cut positions of each axis of the mesh, increasing. Each one divides the next if the parts fit.
using Cuts = std::vector<std::vector<int32_t>>;

Cuts cuts_of(const Layout& from, const Layout& to) {
  Cuts cuts(from.mesh().axes().size());
  const auto add = [&](const AxisRef& ref) {
    auto& at = cuts[static_cast<size_t>(ref.axis)];
    at.push_back(ref.pre);
    at.push_back(ref.pre * ref.size);
  };
  for (const Layout* layout : {&from, &to}) {
    for (const AxisList& axes : layout->dims()) std::for_each(axes.begin(), axes.end(), add);
    for (const Partial& p : layout->partial()) add(p.axis);
    const AxisList invariant = merged(layout->invariant());
    std::for_each(invariant.begin(), invariant.end(), add);
  }
  for (auto& at : cuts) {
    std::sort(at.begin(), at.end());
    at.erase(std::unique(at.begin(), at.end()), at.end());
  }
  return cuts;
}

bool fits(const std::vector<int32_t>& cuts) {
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] % cuts[i - 1] != 0) return false;
  }
  return true;
}

AxisList pieces(const AxisRef& ref, const Cuts& cuts) {
  AxisList out;
  int32_t begin = ref.pre;
  for (const int32_t cut : cuts[static_cast<size_t>(ref.axis)]) {
    if (cut <= begin || cut > ref.pre * ref.size) continue;
    out.push_back({ref.axis, begin, cut / begin});
    begin = cut;
  }
  if (out.empty()) out.push_back(ref);  // of size 1
  return out;
}

// Returns the layout truncated in each dimension at the first axis that cannot be split as needed,
// and without partial and invariant axes that cannot; the same layout if all can.
Layout truncate_at_misfits(const Layout& layout, const Cuts& cuts, const Shape& shape) {
  std::vector<AxisList> dims = layout.dims();
  std::vector<Partial> partial = layout.partial();
  AxisList invariant = layout.invariant();
  const auto is_misfit = [&](const AxisRef& ref) {
    return !fits(cuts[static_cast<size_t>(ref.axis)]);
  };
  for (size_t d = 0; d < dims.size(); ++d) {
    const bool even = is_even(shape[d], dims[d]);
    const auto bad = std::find_if(dims[d].begin(), dims[d].end(), [&](const AxisRef& ref) {
      return is_misfit(ref) || (!even && pieces(ref, cuts).size() > 1);
    });
    dims[d].erase(bad, dims[d].end());
  }
  std::erase_if(partial, [&](const Partial& p) { return is_misfit(p.axis); });
  std::erase_if(invariant, is_misfit);
  return Layout(layout.mesh(), std::move(dims), std::move(partial), std::move(invariant));
}

Layout split_layout(const Layout& layout, const Cuts& cuts) {
  std::vector<AxisList> dims(layout.num_dims());
  std::vector<Partial> partial;
  for (size_t d = 0; d < dims.size(); ++d) {
    for (const AxisRef& ref : layout.dims()[d]) {
      for (const AxisRef& piece : pieces(ref, cuts)) dims[d].push_back(piece);
    }
  }
  for (const Partial& p : layout.partial()) {
    for (const AxisRef& piece : pieces(p.axis, cuts)) partial.push_back({piece, p.kind});
  }
  AxisList invariant;
  for (const AxisRef& ref : merged(layout.invariant())) {
    for (const AxisRef& piece : pieces(ref, cuts)) invariant.push_back(piece);
  }
  return Layout(layout.mesh(), std::move(dims), std::move(partial), std::move(invariant));
}

}  // namespace

Split split_refs(const Layout& from, const Layout& to, const Shape& shape) {
  const Cuts cuts = cuts_of(from, to);
  Split out;
  for (const Layout* end : {&from, &to}) {
    const Layout kept = truncate_at_misfits(*end, cuts, shape);
    if (kept == *end) continue;
    out.meet = kept;
    return out;
  }
  out.layouts.emplace(split_layout(from, cuts), split_layout(to, cuts));
  return out;
}

}  // namespace torch_overlap::mesh
