#include "torch_overlap/mesh/reshard.h"

namespace torch_overlap::mesh {
namespace {

// Would this atom, put at the end of its target dimension now, be where it belongs?
bool fits_at_end(const Reshard& reshard, const State& state, size_t atom) {
  const int8_t dim = reshard.goal().place[atom];
  if (dim < 0) return false;
  const AtomList list = reshard.in_dim(state, static_cast<size_t>(dim));
  if (list.count != reshard.goal().order[atom]) return false;
  for (uint8_t i = 0; i < list.count; ++i) {
    const uint8_t other = list.ids[i];
    if (reshard.goal().place[other] != dim || reshard.goal().order[other] != i) return false;
  }
  return true;
}

// How many of a dimension's first atoms are where they belong.
uint8_t settled(const Reshard& reshard, const AtomList& list, size_t dim) {
  uint8_t count = 0;
  while (count < list.count && reshard.goal().place[list.ids[count]] == static_cast<int8_t>(dim) &&
         reshard.goal().order[list.ids[count]] == static_cast<int8_t>(count)) {
    ++count;
  }
  return count;
}

// One more step: pending axes first, then what is in the way, then slices.
Edge next_edge(const Reshard& reshard, const State& state) {
  Edge edge;
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kPending || !fits_at_end(reshard, state, i)) continue;
    edge.kind = StepKind::kReduceScatter;
    edge.dim = reshard.goal().place[i];
    edge.atoms.push_back(i);
    return edge;
  }
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kPending) continue;
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
    const AtomList list = reshard.in_dim(state, d);
    const uint8_t good = settled(reshard, list, d);
    if (good == list.count) continue;
    const uint8_t last = list.ids[list.count - 1];
    edge.from_dim = static_cast<int8_t>(d);
    if (fits_at_end(reshard, state, last)) {
      edge.kind = StepKind::kAllToAll;
      edge.dim = reshard.goal().place[last];
      edge.atoms.push_back(last);
      return edge;
    }
    edge.kind = StepKind::kAllGather;
    edge.dim = edge.from_dim;
    edge.from_dim = -1;
    for (uint8_t i = good; i < list.count; ++i) edge.atoms.push_back(list.ids[i]);
    return edge;
  }
  edge.kind = StepKind::kSlice;
  for (size_t i = 0; i < reshard.num_atoms(); ++i) {
    if (state.place[i] != State::kReplicated || !fits_at_end(reshard, state, i)) continue;
    edge.dim = reshard.goal().place[i];
    edge.atoms.push_back(i);
    break;
  }
  return edge;
}

}  // namespace

std::vector<Edge> greedy_walk(const Reshard& reshard) {
  std::vector<Edge> walk;
  State state = reshard.start();
  while (!reshard.is_goal(state)) {
    walk.push_back(next_edge(reshard, state));
    state = reshard.apply(state, walk.back());
  }
  return walk;
}

}  // namespace torch_overlap::mesh
