#include "torch_overlap/mesh/plan.h"

#include <array>
#include <cstdio>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/reshard.h"

namespace torch_overlap::mesh {
namespace {

constexpr std::array<std::string_view, 8> kStepNames{"slice",          "all_gather", "all_reduce",
                                                     "reduce_scatter", "all_to_all", "permute",
                                                     "make_partial",   "cast"};

void check(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size) {
  TORCH_OVERLAP_CHECK(from.mesh() == to.mesh(), kValue,
                      "plan_reshard: expected two layouts of one mesh, got ", from.mesh().str(),
                      " and ", to.mesh().str());
  check_shape("plan_reshard", from, shape);
  check_shape("plan_reshard", to, shape);
  TORCH_OVERLAP_CHECK(element_size >= 1, kValue,
                      "plan_reshard: expected an element size of at least 1, got ", element_size);
}

using PathFinder = std::vector<Edge> (*)(const Reshard&);

std::vector<Edge> find_best_path(const Reshard& reshard) {
  if (auto walk = find_cheapest_path(reshard)) return *std::move(walk);
  return find_greedy_path(reshard);
}

Plan plan_by(PathFinder walk, const Layout& from, const Layout& to, const Shape& shape,
             int64_t element_size, const CostModel& cost) {
  Plan plan{from, to, shape, element_size, {}};
  const Split split = split_refs(from, to, shape);
  if (split.meet) {
    plan.steps = plan_by(walk, from, *split.meet, shape, element_size, cost).steps;
    for (Step& step : plan_by(walk, *split.meet, to, shape, element_size, cost).steps) {
      plan.steps.push_back(std::move(step));
    }
    return plan;
  }
  const Reshard reshard(split.layouts->first, split.layouts->second, shape, element_size, cost);
  plan.steps = reshard.steps(walk(reshard));
  if (!plan.steps.empty()) {
    plan.steps.front().before = from;
    plan.steps.back().after = to;
  }
  return plan;
}

}  // namespace

std::string_view to_string(StepKind kind) {
  const auto index = static_cast<size_t>(kind);
  TORCH_OVERLAP_CHECK(index < kStepNames.size(), kValue, "StepKind: expected one of them, got ",
                      index);
  return kStepNames[index];
}

bool Step::sends() const noexcept {
  return kind != StepKind::kSlice && kind != StepKind::kMakePartial && kind != StepKind::kCast;
}

int64_t Step::source_at(int64_t index) const {
  const Mesh& mesh = before.mesh();
  int64_t place = 0;
  for (const AxisRef& ref : sources) place = place * ref.size + mesh.coordinate_at(index, ref);
  return mesh.group_at(index, axes)[static_cast<size_t>(place)];
}

std::string Step::str() const {
  const std::string over = before.mesh().names(axes);
  switch (kind) {
    case StepKind::kAllReduce:
    case StepKind::kMakePartial:
      return concat(to_string(kind), " ", to_string(reduce), " over [", over, "]");
    case StepKind::kReduceScatter:
      return concat(to_string(kind), " ", to_string(reduce), " to dim ", dim, " over [", over, "]");
    case StepKind::kAllToAll:
      return concat(to_string(kind), " dim ", from_dim, " to dim ", dim, " over [", over, "]");
    case StepKind::kPermute:
      return concat(to_string(kind), " [", before.mesh().names(sources), "] from [", over, "]");
    case StepKind::kCast: {
      const bool becomes_invariant = size_of(after.invariant()) > size_of(before.invariant());
      return concat(to_string(kind), " [", over, "] to ",
                    becomes_invariant ? "invariant" : "replicated");
    }
    default:
      return concat(to_string(kind), " dim ", dim, " over [", over, "]");
  }
}

double Plan::seconds() const noexcept {
  double sum = 0;
  for (const Step& step : steps) sum += step.seconds;
  return sum;
}

double Plan::wire_bytes() const noexcept {
  double sum = 0;
  for (const Step& step : steps) sum += step.wire_bytes;
  return sum;
}

int64_t Plan::num_sends() const noexcept {
  int64_t count = 0;
  for (const Step& step : steps) count += static_cast<int64_t>(step.sends());
  return count;
}

std::string Plan::explain() const {
  std::string out = concat(list_string(shape), " ", from.str(), " -> ", to.str(), " on ",
                           from.mesh().str(), ": ");
  if (steps.empty()) return out + "nothing to do\n";
  out += concat(num_sends(), num_sends() == 1 ? " collective, " : " collectives, ",
                show_bytes(wire_bytes()), " a rank, ", show_seconds(seconds()), "\n");
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    out += concat("  ", i + 1, ". ", step.str());
    if (step.sends()) {
      out += concat(": ", step.ranks, " ranks, sends ", show_bytes(step.wire_bytes), ", ",
                    show_seconds(step.seconds));
    }
    out += concat(" -> ", step.after.str(), "\n");
  }
  return out;
}

Plan plan_reshard(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size,
                  const CostModel& cost) {
  check(from, to, shape, element_size);
  Plan plan = plan_by(find_best_path, from, to, shape, element_size, cost);
  // A search that stops at an intermediate layout may be worse than the greedy plan.
  Plan greedy = plan_by(find_greedy_path, from, to, shape, element_size, cost);
  return plan.seconds() <= greedy.seconds() ? plan : greedy;
}

double reshard_seconds(const Layout& from, const Layout& to, const Shape& shape,
                       int64_t element_size, const CostModel& cost) {
  check(from, to, shape, element_size);
  const Split split = split_refs(from, to, shape);
  if (split.meet) return plan_reshard(from, to, shape, element_size, cost).seconds();
  const Reshard reshard(split.layouts->first, split.layouts->second, shape, element_size, cost);
  return reshard.seconds(find_best_path(reshard));
}

Plan greedy_reshard(const Layout& from, const Layout& to, const Shape& shape, int64_t element_size,
                    const CostModel& cost) {
  check(from, to, shape, element_size);
  return plan_by(find_greedy_path, from, to, shape, element_size, cost);
}

namespace {

std::string scaled(double value, const char* const* units, double factor, int count) {
  int unit = 0;
  while (unit + 1 < count && value >= factor) {
    value /= factor;
    ++unit;
  }
  char text[64];
  std::snprintf(text, sizeof text,
                value < 10    ? "%.2f %s"
                : value < 100 ? "%.1f %s"
                              : "%.0f %s",
                value, units[unit]);
  return text;
}

}  // namespace

std::string show_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB", "PB"};
  return scaled(bytes, kUnits, 1000, 6);
}

std::string show_seconds(double seconds) {
  constexpr const char* kUnits[] = {"us", "ms", "s"};
  return scaled(seconds * 1e6, kUnits, 1000, 3);
}

}  // namespace torch_overlap::mesh
