// Propagates axes along the factors of a graph's operators, in both directions, to a fixed point.

#include <algorithm>
#include <set>

#include "torch_overlap/mesh/graph.h"
#include "torch_overlap/mesh/propagate_search.h"

namespace torch_overlap::mesh {
namespace {

struct DimState {
  AxisList axes;
  bool is_open = true;
  int64_t priority = 0;
};
using ValueState = std::vector<DimState>;

bool uses_axis(const ValueState& value, const AxisRef& ref) {
  return std::any_of(value.begin(), value.end(), [&](const DimState& dim) {
    return std::any_of(dim.axes.begin(), dim.axes.end(),
                       [&](const AxisRef& other) { return overlap(ref, other); });
  });
}

bool starts_with(const AxisList& list, const AxisList& start) {
  return start.size() <= list.size() && std::equal(start.begin(), start.end(), list.begin());
}

// Merges the axes of each factor over all operands of a node, and writes the result back.
class NodePropagation {
 public:
  NodePropagation(const GraphNode& node, std::vector<ValueState>& values)
      : node_(node), values_(values) {
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      operands_.emplace_back(&node.rule.inputs[i], node.inputs[i]);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      operands_.emplace_back(&node.rule.outputs[i], node.outputs[i]);
    }
  }

  bool run() {
    bool changed = false;
    for (size_t f = 0; f < node_.rule.factors.size(); ++f) {
      if (node_.rule.factors[f].kind == FactorKind::kWhole) continue;
      const AxisList axes = merged_axes(static_cast<int32_t>(f));
      if (axes.empty()) continue;
      for (auto& [operand, value] : operands_) {
        for (size_t d = 0; d < operand->dims.size(); ++d) {
          changed = write(*operand, values_[value], d, static_cast<int32_t>(f), axes) || changed;
        }
      }
    }
    return changed;
  }

 private:
  static AxisList read(const OpRule& rule, const Operand& operand, const ValueState& value,
                       size_t d, int32_t factor) {
    AxisList out;
    for (const auto& [f, ref] : axes_on_factors(rule, operand.dims[d], value[d].axes)) {
      if (f == factor) out.push_back(ref);
    }
    return out;
  }

  // Returns the axes of the highest priority. Among equal priorities it is the longest list if all
  // others are prefixes of it, otherwise their common prefix.
  AxisList merged_axes(int32_t factor) const {
    std::vector<std::pair<int64_t, AxisList>> proposed;
    for (const auto& [operand, value] : operands_) {
      for (size_t d = 0; d < operand->dims.size(); ++d) {
        const auto& dim = operand->dims[d];
        if (std::find(dim.begin(), dim.end(), factor) == dim.end()) continue;
        AxisList axes = read(node_.rule, *operand, values_[value], d, factor);
        if (!axes.empty()) proposed.emplace_back(values_[value][d].priority, std::move(axes));
      }
    }
    if (proposed.empty()) return {};
    int64_t strongest = proposed[0].first;
    for (const auto& [priority, axes] : proposed) strongest = std::min(strongest, priority);
    AxisList best;
    bool is_first = true;
    for (const auto& [priority, axes] : proposed) {
      if (priority != strongest) continue;
      if (is_first || starts_with(axes, best)) {
        best = axes;
      } else if (!starts_with(best, axes)) {
        size_t same = 0;
        while (same < best.size() && same < axes.size() && best[same] == axes[same]) ++same;
        best.resize(same);
      }
      is_first = false;
    }
    return best;
  }

  bool write(const Operand& operand, ValueState& value, size_t d, int32_t factor,
             const AxisList& axes) const {
    const auto& factors = operand.dims[d];
    const auto at = std::find(factors.begin(), factors.end(), factor);
    DimState& dim = value[d];
    if (at == factors.end() || !dim.is_open) return false;
    // The factors before this one must be filled by their own axes, and those after it must be
    // free.
    const auto placed = axes_on_factors(node_.rule, factors, dim.axes);
    AxisList own;
    std::vector<int64_t> filled(node_.rule.factors.size(), 1);
    for (const auto& [f, ref] : placed) {
      filled[static_cast<size_t>(f)] *= ref.size;
      if (f == factor) own.push_back(ref);
    }
    if (!starts_with(axes, own) || axes.size() == own.size()) return false;
    for (auto before = factors.begin(); before != at; ++before) {
      const auto i = static_cast<size_t>(*before);
      if (filled[i] != node_.rule.factors[i].size) return false;
    }
    for (auto behind = at + 1; behind != factors.end(); ++behind) {
      if (filled[static_cast<size_t>(*behind)] != 1) return false;
    }
    const Factor& info = node_.rule.factors[static_cast<size_t>(factor)];
    bool changed = false;
    for (size_t i = own.size(); i < axes.size(); ++i) {
      const int64_t size = filled[static_cast<size_t>(factor)] * axes[i].size;
      const bool fits = factors.size() == 1 ? size <= info.size : info.size % size == 0;
      if (!fits || uses_axis(value, axes[i])) break;
      dim.axes.push_back(axes[i]);
      filled[static_cast<size_t>(factor)] = size;
      changed = true;
    }
    return changed;
  }

  const GraphNode& node_;
  std::vector<ValueState>& values_;
  std::vector<std::pair<const Operand*, size_t>> operands_;
};

bool is_reducing(const GraphNode& node) {
  return node.rule.compute == Compute::kProduct ||
         std::any_of(node.rule.factors.begin(), node.rule.factors.end(),
                     [](const Factor& f) { return f.kind == FactorKind::kReduced; });
}

void propagate_axes(const Graph& graph, std::vector<ValueState>& values) {
  for (const bool with_reducing : {false, true}) {
    for (bool changed = true; changed;) {
      changed = false;
      const auto visit = [&](const GraphNode& node) {
        if (!with_reducing && is_reducing(node)) return;
        changed = NodePropagation(node, values).run() || changed;
      };
      for (const GraphNode& node : graph.nodes()) visit(node);
      for (auto node = graph.nodes().rbegin(); node != graph.nodes().rend(); ++node) visit(*node);
    }
  }
}

}  // namespace

std::vector<std::vector<AxisList>> propagate_dims(const Graph& graph, int64_t max_priority) {
  std::vector<ValueState> values;
  std::set<int64_t> priorities{0};
  for (const GraphValue& value : graph.values()) {
    values.emplace_back(value.shape.size());
    if (!value.constraint) continue;
    for (const DimConstraint& dim : value.constraint->dims) priorities.insert(dim.priority);
  }
  for (const int64_t priority : priorities) {
    if (priority > max_priority) break;
    // Applies the constraints of this priority. Axes that higher priorities put there stay.
    for (size_t v = 0; v < values.size(); ++v) {
      if (!graph.values()[v].constraint) continue;
      const Constraint& constraint = *graph.values()[v].constraint;
      for (size_t d = 0; d < constraint.dims.size(); ++d) {
        const DimConstraint& proposed = constraint.dims[d];
        if (proposed.priority != priority) continue;
        DimState& dim = values[v][d];
        if (starts_with(proposed.axes, dim.axes)) {
          for (size_t i = dim.axes.size(); i < proposed.axes.size(); ++i) {
            if (uses_axis(values[v], proposed.axes[i])) break;
            dim.axes.push_back(proposed.axes[i]);
          }
        }
        dim.is_open = proposed.is_open;
        dim.priority = proposed.priority;
      }
    }
    propagate_axes(graph, values);
  }
  std::vector<std::vector<AxisList>> out;
  for (const ValueState& value : values) {
    out.emplace_back();
    for (const DimState& dim : value) out.back().push_back(dim.axes);
  }
  return out;
}

}  // namespace torch_overlap::mesh
