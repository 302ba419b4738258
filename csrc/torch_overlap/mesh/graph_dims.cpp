// Axes carried along the factors of a graph's operators, both ways, to a fixed point.

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

bool uses(const ValueState& value, const AxisRef& ref) {
  return std::any_of(value.begin(), value.end(), [&](const DimState& dim) {
    return std::any_of(dim.axes.begin(), dim.axes.end(),
                       [&](const AxisRef& other) { return overlap(ref, other); });
  });
}

bool begins_with(const AxisList& list, const AxisList& start) {
  return start.size() <= list.size() && std::equal(start.begin(), start.end(), list.begin());
}

// Reads what every operand says of each factor, and writes the common opinion back.
class NodeMerge {
 public:
  NodeMerge(const GraphNode& node, std::vector<ValueState>& values) : node_(node), values_(values) {
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
      const AxisList axes = opinion(static_cast<int32_t>(f));
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

  // The strongest priority speaks; among equals the longest list that all others begin, else what
  // all begin with.
  AxisList opinion(int32_t factor) const {
    std::vector<std::pair<int64_t, AxisList>> said;
    for (const auto& [operand, value] : operands_) {
      for (size_t d = 0; d < operand->dims.size(); ++d) {
        const auto& dim = operand->dims[d];
        if (std::find(dim.begin(), dim.end(), factor) == dim.end()) continue;
        AxisList axes = read(node_.rule, *operand, values_[value], d, factor);
        if (!axes.empty()) said.emplace_back(values_[value][d].priority, std::move(axes));
      }
    }
    if (said.empty()) return {};
    int64_t strongest = said[0].first;
    for (const auto& [priority, axes] : said) strongest = std::min(strongest, priority);
    AxisList best;
    bool is_first = true;
    for (const auto& [priority, axes] : said) {
      if (priority != strongest) continue;
      if (is_first || begins_with(axes, best)) {
        best = axes;
      } else if (!begins_with(best, axes)) {
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
    // What is before this factor must fill its own factors, what is behind must be free.
    const auto placed = axes_on_factors(node_.rule, factors, dim.axes);
    AxisList own;
    std::vector<int64_t> filled(node_.rule.factors.size(), 1);
    for (const auto& [f, ref] : placed) {
      filled[static_cast<size_t>(f)] *= ref.size;
      if (f == factor) own.push_back(ref);
    }
    if (!begins_with(axes, own) || axes.size() == own.size()) return false;
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
      if (!fits || uses(value, axes[i])) break;
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

bool reduces(const GraphNode& node) {
  return node.rule.compute == Compute::kProduct ||
         std::any_of(node.rule.factors.begin(), node.rule.factors.end(),
                     [](const Factor& f) { return f.kind == FactorKind::kReduced; });
}

void spread(const Graph& graph, std::vector<ValueState>& values) {
  for (const bool with_reducing : {false, true}) {
    for (bool changed = true; changed;) {
      changed = false;
      const auto visit = [&](const GraphNode& node) {
        if (!with_reducing && reduces(node)) return;
        changed = NodeMerge(node, values).run() || changed;
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
    // What is said with this priority is heard now; it keeps what stronger voices put there.
    for (size_t v = 0; v < values.size(); ++v) {
      if (!graph.values()[v].constraint) continue;
      const Constraint& constraint = *graph.values()[v].constraint;
      for (size_t d = 0; d < constraint.dims.size(); ++d) {
        const DimConstraint& said = constraint.dims[d];
        if (said.priority != priority) continue;
        DimState& dim = values[v][d];
        if (begins_with(said.axes, dim.axes)) {
          for (size_t i = dim.axes.size(); i < said.axes.size(); ++i) {
            if (uses(values[v], said.axes[i])) break;
            dim.axes.push_back(said.axes[i]);
          }
        }
        dim.is_open = said.is_open;
        dim.priority = said.priority;
      }
    }
    spread(graph, values);
  }
  std::vector<std::vector<AxisList>> out;
  for (const ValueState& value : values) {
    out.emplace_back();
    for (const DimState& dim : value) out.back().push_back(dim.axes);
  }
  return out;
}

}  // namespace torch_overlap::mesh
