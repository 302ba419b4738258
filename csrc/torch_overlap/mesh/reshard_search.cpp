// Dijkstra's algorithm over the places of at most four atoms: a few hundred states, usually far
// fewer.

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "torch_overlap/mesh/reshard.h"

namespace torch_overlap::mesh {
namespace {

constexpr size_t kMaxSearchAtoms = 4;
constexpr size_t kMaxSearchStates = 20000;

struct Node {
  State state;
  double seconds = 0;
  int32_t steps = 0;
  int32_t parent = -1;
  Edge edge = {};
  bool done = false;
};

uint64_t key_of(const Reshard& reshard, const State& state) {
  uint64_t key = 0;
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    const auto place = static_cast<uint8_t>(state.place[i]);
    const auto order = static_cast<uint8_t>(state.place[i] >= 0 ? state.order[i] : 0);
    key = key << 16 | static_cast<uint64_t>(place) << 8 | order;
  }
  return key;
}

class Neighbours {
 public:
  Neighbours(const Reshard& reshard, const State& state) : reshard_(reshard), state_(state) {
    for (size_t d = 0; d < reshard.num_dims(); ++d)
      lists_.push_back(reshard.atoms_in_dim(state, d));
    add_slices();
    add_reductions();
    add_gathers_and_all_to_alls();
    add_permutes();
  }
  const std::vector<Edge>& edges() const noexcept { return edges_; }

 private:
  void add_slices() {
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      if (state_.place[i] != State::kReplicated || reshard_.goal().place[i] < 0) continue;
      for (size_t d = 0; d < lists_.size(); ++d) {
        Edge edge{.kind = StepKind::kSlice, .dim = static_cast<int8_t>(d)};
        edge.atoms.push_back(i);
        edges_.push_back(edge);
      }
    }
  }

  // Adds the reduction of every set of partial atoms, or their scatter in the order of the target.
  void add_reductions() {
    std::vector<size_t> pending;
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      if (state_.place[i] == State::kPartial) pending.push_back(i);
    }
    std::sort(pending.begin(), pending.end(), [&](size_t a, size_t b) {
      return std::tuple(reshard_.goal().order[a], a) < std::tuple(reshard_.goal().order[b], b);
    });
    for (uint32_t mask = 1; mask < (1U << pending.size()); ++mask) {
      Edge edge{.kind = StepKind::kAllReduce};
      bool is_same_reduction = true;
      for (size_t i = 0; i < pending.size(); ++i) {
        if ((mask >> i & 1U) == 0) continue;
        edge.atoms.push_back(pending[i]);
        is_same_reduction = is_same_reduction &&
                            reshard_.reduce_of(pending[i]) == reshard_.reduce_of(edge.atoms.ids[0]);
      }
      if (!is_same_reduction) continue;
      edges_.push_back(edge);
      edge.kind = StepKind::kReduceScatter;
      for (size_t d = 0; d < lists_.size(); ++d) {
        edge.dim = static_cast<int8_t>(d);
        edges_.push_back(edge);
      }
    }
  }

  // Adds gathers of the last atoms of a dimension, and their moves to another dimension.
  void add_gathers_and_all_to_alls() {
    for (size_t d = 0; d < lists_.size(); ++d) {
      for (uint8_t count = 1; count <= lists_[d].count; ++count) {
        Edge edge{.kind = StepKind::kAllGather, .dim = static_cast<int8_t>(d)};
        for (auto i = static_cast<uint8_t>(lists_[d].count - count); i < lists_[d].count; ++i) {
          edge.atoms.push_back(lists_[d].ids[i]);
        }
        edges_.push_back(edge);
        edge.kind = StepKind::kAllToAll;
        edge.from_dim = static_cast<int8_t>(d);
        for (size_t e = 0; e < lists_.size(); ++e) {
          if (e == d) continue;
          edge.dim = static_cast<int8_t>(e);
          edges_.push_back(edge);
        }
      }
    }
  }

  // Adds permutes: each dimension gets other atoms, or the same in another order, such that the
  // number of its parts is unchanged and more atoms are at their goal.
  void add_permutes() {
    for (const AtomList& list : lists_) {
      int64_t parts = 1;
      for (const uint8_t atom : list) parts *= reshard_.atom_size(atom);
      num_parts_.push_back(parts);
    }
    num_atoms_at_goal_ = num_atoms_at_goal(lists_);
    std::vector<AtomList> lists(lists_.size());
    search_permutations(0, 1, 0, lists);
  }

  int num_atoms_at_goal(const std::vector<AtomList>& lists) const {
    int count = 0;
    for (size_t d = 0; d < lists.size(); ++d) {
      for (uint8_t i = 0; i < lists[d].count; ++i) {
        const uint8_t atom = lists[d].ids[i];
        count += static_cast<int>(reshard_.goal().place[atom] == static_cast<int8_t>(d) &&
                                  reshard_.goal().order[atom] == static_cast<int8_t>(i));
      }
    }
    return count;
  }

  // Continues with dimension `dim`, which has `parts` parts so far. `used`: bit mask of atoms.
  void search_permutations(size_t dim, int64_t parts, uint64_t used, std::vector<AtomList>& lists) {
    while (dim < lists.size() && parts == num_parts_[dim]) {
      ++dim;
      parts = 1;
    }
    if (dim == lists.size()) {
      if (num_atoms_at_goal(lists) > num_atoms_at_goal_) add_permute(lists, used);
      return;
    }
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      const int64_t more = parts * reshard_.atom_size(i);
      if ((used >> i & 1U) != 0 || num_parts_[dim] % more != 0) continue;
      if (state_.place[i] == State::kPartial) continue;
      lists[dim].push_back(i);
      search_permutations(dim, more, used | uint64_t{1} << i, lists);
      --lists[dim].count;
    }
  }

  void add_permute(const std::vector<AtomList>& lists, uint64_t used) {
    Edge edge{.kind = StepKind::kPermute, .after = state_};
    for (size_t d = 0; d < lists.size(); ++d) {
      if (!add_group_change(edge, d, lists[d])) return;
      for (uint8_t i = 0; i < lists[d].count; ++i) {
        edge.after.place[lists[d].ids[i]] = static_cast<int8_t>(d);
        edge.after.order[lists[d].ids[i]] = static_cast<int8_t>(i);
      }
    }
    // Among ranks with equal parts each sends to one rank: ranks that differ along incoming atoms
    // send to ranks that differ along outgoing atoms.
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      const bool is_in = state_.place[i] >= 0;
      const bool will_be_in = (used >> i & 1U) != 0;
      if (!is_in && will_be_in) edge.atoms.push_back(i);
      if (!is_in || will_be_in) continue;
      edge.sources.push_back(i);
      edge.after.place[i] = State::kReplicated;
    }
    edges_.push_back(edge);
  }

  // Adds the change of this dimension in the shortest runs of atoms that have equal numbers of
  // parts before and after. Returns false if the parts would differ.
  bool add_group_change(Edge& edge, size_t dim, const AtomList& after) const {
    const AtomList& before = lists_[dim];
    int64_t parts = 1;
    for (uint8_t i = 0, j = 0; i < before.count;) {
      const uint8_t first = i;
      const uint8_t other_first = j;
      int64_t own = reshard_.atom_size(before.ids[i++]);
      int64_t other = reshard_.atom_size(after.ids[j++]);
      while (own != other) {
        if (own < other) {
          own *= reshard_.atom_size(before.ids[i++]);
        } else {
          other *= reshard_.atom_size(after.ids[j++]);
        }
      }
      parts *= own;
      const bool is_single_atom = i - first == 1 && j - other_first == 1;
      if (is_single_atom && before.ids[first] == after.ids[other_first]) continue;
      if (!is_single_atom && !reshard_.divides(dim, parts)) return false;
      for (uint8_t k = first; k < i; ++k) edge.atoms.push_back(before.ids[k]);
      for (uint8_t k = other_first; k < j; ++k) edge.sources.push_back(after.ids[k]);
    }
    return true;
  }

  const Reshard& reshard_;
  const State& state_;
  std::vector<AtomList> lists_;
  std::vector<int64_t> num_parts_;  // per dimension: number of its parts
  int num_atoms_at_goal_ = 0;       // number of atoms at their goal
  std::vector<Edge> edges_;
};

std::vector<Edge> path_to(const std::vector<Node>& nodes, int32_t last) {
  std::vector<Edge> walk;
  for (int32_t i = last; nodes[static_cast<size_t>(i)].parent >= 0;
       i = nodes[static_cast<size_t>(i)].parent) {
    walk.push_back(nodes[static_cast<size_t>(i)].edge);
  }
  std::reverse(walk.begin(), walk.end());
  return walk;
}

}  // namespace

std::optional<std::vector<Edge>> find_cheapest_path(const Reshard& reshard) {
  if (reshard.num_atoms() > kMaxSearchAtoms) return std::nullopt;
  std::vector<Node> nodes{{.state = reshard.start()}};
  std::unordered_map<uint64_t, int32_t> known{{key_of(reshard, reshard.start()), 0}};
  using Entry = std::tuple<double, int32_t, int32_t>;  // seconds, steps, node: ties in this order
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;
  open.emplace(0, 0, 0);
  while (!open.empty()) {
    const int32_t at = std::get<2>(open.top());
    open.pop();
    if (nodes[static_cast<size_t>(at)].done) continue;
    nodes[static_cast<size_t>(at)].done = true;
    const Node here = nodes[static_cast<size_t>(at)];
    if (reshard.is_goal(here.state)) return path_to(nodes, at);
    if (nodes.size() > kMaxSearchStates) return std::nullopt;
    const Neighbours neighbours(reshard, here.state);
    for (const Edge& edge : neighbours.edges()) {
      const State next = reshard.apply(here.state, edge);
      const double seconds = here.seconds + reshard.seconds(edge, here.state, next);
      const int32_t steps = here.steps + 1;
      const auto [entry, is_new] =
          known.try_emplace(key_of(reshard, next), static_cast<int32_t>(nodes.size()));
      if (is_new) nodes.emplace_back();
      Node& node = nodes[static_cast<size_t>(entry->second)];
      if (!is_new &&
          (node.done || std::tuple(seconds, steps) >= std::tuple(node.seconds, node.steps))) {
        continue;
      }
      node = {.state = next, .seconds = seconds, .steps = steps, .parent = at, .edge = edge};
      open.emplace(seconds, steps, entry->second);
    }
  }
  return std::nullopt;
}

}  // namespace torch_overlap::mesh
