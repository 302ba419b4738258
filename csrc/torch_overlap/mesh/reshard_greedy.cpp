#include "torch_overlap/mesh/reshard.h"

namespace torch_overlap::mesh {
namespace {

// True if this atom would be at its goal if it were appended to its target dimension now.
bool is_next_at_goal(const Reshard& reshard, const State& state, size_t atom) {
  const int8_t dim = reshard.goal().place[atom];
  if (dim < 0) return false;
  const AtomList list = reshard.atoms_in_dim(state, static_cast<size_t>(dim));
  if (list.count != reshard.goal().order[atom]) return false;
  for (uint8_t i = 0; i < list.count; ++i) {
    const uint8_t other = list.ids[i];
    if (reshard.goal().place[other] != dim || reshard.goal().order[other] != i) return false;
  }
  return true;
}

// Returns the number of a dimension's leading atoms that are at their goal.
uint8_t num_settled_atoms(const Reshard& reshard, const AtomList& list, size_t dim) {
  uint8_t count = 0;
  while (count < list.count && reshard.goal().place[list.ids[count]] == static_cast<int8_t>(dim) &&
         reshard.goal().order[list.ids[count]] == static_cast<int8_t>(count)) {
    ++count;
  }
  return count;
}

// Returns the next step: partial axes first, then axes in the wrong place, then slices.
Edge next_edge(const Reshard& reshard, const State& state) {
  Edge edge;
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kPartial || !is_next_at_goal(reshard, state, i)) continue;
    edge.kind = StepKind::kReduceScatter;
    edge.dim = reshard.goal().place[i];
    edge.atoms.push_back(i);
    return edge;
  }
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kPartial) continue;
    const bool is_first = edge.atoms.count == 0;
    if (is_first || reshard.reduce_of(i) == reshard.reduce_of(edge.atoms.ids[0])) {
      edge.atoms.push_back(i);
    }
  }
  if (edge.atoms.count > 0) {
    edge.kind = StepKind::kAllReduce;
    return edge;
  }
  for (size_t d = 0; d < reshard.num_dims(); ++d) {
    const AtomList list = reshard.atoms_in_dim(state, d);
    const uint8_t num_settled = num_settled_atoms(reshard, list, d);
    if (num_settled == list.count) continue;
    const uint8_t last = list.ids[list.count - 1];
    edge.from_dim = static_cast<int8_t>(d);
    if (is_next_at_goal(reshard, state, last)) {
      edge.kind = StepKind::kAllToAll;
      edge.dim = reshard.goal().place[last];
      edge.atoms.push_back(last);
      return edge;
    }
    edge.kind = StepKind::kAllGather;
    edge.dim = edge.from_dim;
    edge.from_dim = -1;
    for (uint8_t i = num_settled; i < list.count; ++i) edge.atoms.push_back(list.ids[i]);
    return edge;
  }
  edge.kind = StepKind::kSlice;
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kReplicated || !is_next_at_goal(reshard, state, i)) continue;
    edge.dim = reshard.goal().place[i];
    edge.atoms.push_back(i);
    break;
  }
  return edge;
}

}  // namespace

std::vector<Edge> find_greedy_path(const Reshard& reshard) {
  std::vector<Edge> walk;
  State state = reshard.start();
  while (!reshard.is_goal(state)) {
    walk.push_back(next_edge(reshard, state));
    state = reshard.apply(state, walk.back());
  }
  return walk;
}

}  // namespace torch_overlap::mesh
