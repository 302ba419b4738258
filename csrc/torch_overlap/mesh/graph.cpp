#include "torch_overlap/mesh/graph.h"

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {

Constraint Constraint::fixed(const Layout& layout) {
  Constraint out;
  for (const AxisList& axes : layout.dims()) out.dims.push_back({axes, false, 0});
  out.partial = layout.partial();
  out.invariant = layout.invariant();
  return out;
}

void Graph::check(const GraphValue& value) const {
  TORCH_OVERLAP_CHECK(value.element_size >= 1, kValue, "Graph: expected an element size of at ",
                      "least 1 for '", value.name, "', got ", value.element_size);
  if (!value.constraint) return;
  TORCH_OVERLAP_CHECK(value.constraint->dims.size() == value.shape.size(), kValue,
                      "Graph: expected a constraint of ", value.shape.size(), " dimensions for '",
                      value.name, "', got ", value.constraint->dims.size());
  std::vector<AxisList> dims;
  for (const DimConstraint& dim : value.constraint->dims) {
    TORCH_OVERLAP_CHECK(dim.priority >= 0, kValue, "Graph: expected priorities of at least 0 for '",
                        value.name, "', got ", dim.priority);
    dims.push_back(dim.axes);
  }
  const Layout valid(mesh_, std::move(dims), value.constraint->partial,
                     value.constraint->invariant);
  check_shape("Graph", valid, value.shape);
}

size_t Graph::add_value(GraphValue value) {
  check(value);
  values_.push_back(std::move(value));
  producer_.push_back(-1);
  is_consumed_.push_back(false);
  return values_.size() - 1;
}

std::vector<size_t> Graph::add_node(OpRule rule, std::vector<size_t> inputs,
                                    std::vector<std::string> output_names, int64_t element_size) {
  TORCH_OVERLAP_CHECK(inputs.size() == rule.inputs.size(), kValue, rule.op, ": expected ",
                      rule.inputs.size(), " inputs, got ", inputs.size());
  TORCH_OVERLAP_CHECK(output_names.size() == rule.outputs.size(), kValue, rule.op, ": expected ",
                      rule.outputs.size(), " names of outputs, got ", output_names.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_OVERLAP_CHECK(inputs[i] < values_.size(), kValue, rule.op, ": expected one of ",
                        values_.size(), " values as input ", i, ", got ", inputs[i]);
    TORCH_OVERLAP_CHECK(values_[inputs[i]].shape == rule.inputs[i].shape, kValue, rule.op,
                        ": expected shape ", list_string(rule.inputs[i].shape), " as input ", i,
                        ", got ", list_string(values_[inputs[i]].shape));
  }
  std::vector<size_t> outputs;
  for (size_t i = 0; i < rule.outputs.size(); ++i) {
    outputs.push_back(add_value({output_names[i], rule.outputs[i].shape, element_size}));
    producer_.back() = static_cast<int64_t>(nodes_.size());
  }
  for (const size_t v : inputs) is_consumed_[v] = true;
  nodes_.push_back({std::move(rule), std::move(inputs), outputs});
  return outputs;
}

void Graph::constrain(size_t value, Constraint constraint) {
  GraphValue changed = values_.at(value);
  changed.constraint = std::move(constraint);
  check(changed);
  values_[value] = std::move(changed);
}

double GraphPlan::wire_bytes() const noexcept {
  double sum = 0;
  for (const NodePlan& node : nodes) {
    for (const Plan& plan : node.plans) sum += plan.wire_bytes();
  }
  for (const auto& [value, plan] : results) sum += plan.wire_bytes();
  return sum;
}

int64_t GraphPlan::num_sends() const noexcept {
  int64_t count = 0;
  for (const NodePlan& node : nodes) {
    for (const Plan& plan : node.plans) count += plan.num_sends();
  }
  for (const auto& [value, plan] : results) count += plan.num_sends();
  return count;
}

std::string explain(const Graph& graph, const GraphPlan& plan) {
  std::string out =
      concat(graph.mesh().str(), ": ", plan.num_sends(), " collectives, ",
             show_bytes(plan.wire_bytes()), " a rank, ", show_seconds(plan.seconds()), " (moving ",
             show_seconds(plan.reshard), ", computing ", show_seconds(plan.compute), ", gradients ",
             show_seconds(plan.gradients), ")\n");
  const auto steps = [&](const Plan& one) {
    std::string text;
    for (const Step& step : one.steps) {
      if (step.sends())
        text += concat("      ", step.str(), ", ", show_seconds(step.seconds), "\n");
    }
    return text;
  };
  for (size_t v = 0; v < graph.values().size(); ++v) {
    if (graph.is_input(v)) {
      out += concat("  ", graph.values()[v].name, " ", list_string(graph.values()[v].shape), " ",
                    plan.layouts[v].str(), "\n");
    }
  }
  for (size_t n = 0; n < graph.nodes().size(); ++n) {
    const GraphNode& node = graph.nodes()[n];
    for (const Plan& one : plan.nodes[n].plans) out += steps(one);
    for (const size_t v : node.outputs) {
      out += concat("  ", graph.values()[v].name, " ", list_string(graph.values()[v].shape), " ",
                    plan.layouts[v].str());
    }
    out += concat("  = ", node.rule.op, ", ", plan.nodes[n].strategy.roles, ", ",
                  show_seconds(plan.nodes[n].strategy.compute), "\n");
    for (const auto& [value, one] : plan.results) {
      if (std::find(node.outputs.begin(), node.outputs.end(), value) == node.outputs.end())
        continue;
      out += concat(steps(one), "  ", graph.values()[value].name, " ", one.to.str(), "\n");
    }
  }
  return out;
}

}  // namespace torch_overlap::mesh
