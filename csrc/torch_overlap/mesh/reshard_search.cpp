// Dijkstra's algorithm over the places of at most four atoms: some hundred states, mostly far
// fewer.

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "torch_overlap/mesh/reshard.h"

namespace torch_overlap::mesh {
namespace {

constexpr size_t kMostAtoms = 4;
constexpr size_t kMostStates = 20000;

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
    for (size_t d = 0; d < reshard.num_dims(); ++d) lists_.push_back(reshard.in_dim(state, d));
    slices();
    reductions();
    moves();
    permutes();
  }
  const std::vector<Edge>& edges() const noexcept { return edges_; }

 private:
  void slices() {
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      if (state_.place[i] != State::kReplicated || reshard_.goal().place[i] < 0) continue;
      for (size_t d = 0; d < lists_.size(); ++d) {
        Edge edge{.kind = StepKind::kSlice, .dim = static_cast<int8_t>(d)};
        edge.atoms.push_back(i);
        edges_.push_back(edge);
      }
    }
  }

  // Every set of pending atoms, reduced, or scattered in the order in which the target has them.
  void reductions() {
    std::vector<size_t> pending;
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      if (state_.place[i] == State::kPending) pending.push_back(i);
    }
    std::sort(pending.begin(), pending.end(), [&](size_t a, size_t b) {
      return std::tuple(reshard_.goal().order[a], a) < std::tuple(reshard_.goal().order[b], b);
    });
    for (uint32_t mask = 1; mask < (1U << pending.size()); ++mask) {
      Edge edge{.kind = StepKind::kAllReduce};
      bool is_one_kind = true;
      for (size_t i = 0; i < pending.size(); ++i) {
        if ((mask >> i & 1U) == 0) continue;
        edge.atoms.push_back(pending[i]);
        is_one_kind =
            is_one_kind && reshard_.reduce_of(pending[i]) == reshard_.reduce_of(edge.atoms.ids[0]);
      }
      if (!is_one_kind) continue;
      edges_.push_back(edge);
      edge.kind = StepKind::kReduceScatter;
      for (size_t d = 0; d < lists_.size(); ++d) {
        edge.dim = static_cast<int8_t>(d);
        edges_.push_back(edge);
      }
    }
  }

  // The last atoms of a dimension are gathered, or go to another dimension.
  void moves() {
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

  // The same places for other atoms of the same sizes, where that brings more of them home.
  void permutes() {
    std::vector<size_t> slots;  // the atoms that are in dimensions now
    std::vector<size_t> free;   // all that may be there
    for (size_t i = 0; i < reshard_.num_atoms(); ++i) {
      if (state_.place[i] >= 0) slots.push_back(i);
      if (state_.place[i] != State::kPending) free.push_back(i);
    }
    std::vector<size_t> chosen;
    assign(slots, free, chosen);
  }

  bool at_home(size_t atom, size_t slot) const {
    return reshard_.goal().place[atom] == state_.place[slot] &&
           reshard_.goal().order[atom] == state_.order[slot];
  }

  void assign(const std::vector<size_t>& slots, const std::vector<size_t>& free,
              std::vector<size_t>& chosen) {
    if (chosen.size() == slots.size()) {
      add_permute(slots, chosen);
      return;
    }
    for (const size_t atom : free) {
      const size_t slot = slots[chosen.size()];
      if (reshard_.atom_size(atom) != reshard_.atom_size(slot)) continue;
      if (std::find(chosen.begin(), chosen.end(), atom) != chosen.end()) continue;
      chosen.push_back(atom);
      assign(slots, free, chosen);
      chosen.pop_back();
    }
  }

  void add_permute(const std::vector<size_t>& slots, const std::vector<size_t>& chosen) {
    int gain = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      gain += static_cast<int>(at_home(chosen[i], slots[i])) -
              static_cast<int>(at_home(slots[i], slots[i]));
    }
    if (gain <= 0) return;
    // slots[i] gives its place to chosen[i]. Atoms that come from nowhere swap with those that go:
    // then every rank sends to exactly one.
    Edge edge{.kind = StepKind::kPermute};
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == chosen[i]) continue;
      edge.atoms.push_back(slots[i]);
      edge.sources.push_back(chosen[i]);
    }
    for (const size_t comer : chosen) {
      if (std::find(slots.begin(), slots.end(), comer) != slots.end()) continue;
      size_t at = comer;  // follow who took whose place to the one that is out
      for (auto slot = std::find(chosen.begin(), chosen.end(), at); slot != chosen.end();
           slot = std::find(chosen.begin(), chosen.end(), at)) {
        at = slots[static_cast<size_t>(slot - chosen.begin())];
      }
      edge.atoms.push_back(comer);
      edge.sources.push_back(at);
    }
    edges_.push_back(edge);
  }

  const Reshard& reshard_;
  const State& state_;
  std::vector<AtomList> lists_;
  std::vector<Edge> edges_;
};

std::vector<Edge> walk_to(const std::vector<Node>& nodes, int32_t last) {
  std::vector<Edge> walk;
  for (int32_t i = last; nodes[static_cast<size_t>(i)].parent >= 0;
       i = nodes[static_cast<size_t>(i)].parent) {
    walk.push_back(nodes[static_cast<size_t>(i)].edge);
  }
  std::reverse(walk.begin(), walk.end());
  return walk;
}

}  // namespace

std::optional<std::vector<Edge>> cheapest_walk(const Reshard& reshard) {
  if (reshard.num_atoms() > kMostAtoms) return std::nullopt;
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
    if (reshard.is_goal(here.state)) return walk_to(nodes, at);
    if (nodes.size() > kMostStates) return std::nullopt;
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
