#include <utility>

#include "torch_overlap/mesh/graph.h"

namespace torch_overlap::mesh {
namespace {

// Returns the layout of a value whose dimensions are all closed.
std::optional<Layout> fixed_layout(const Graph& graph, size_t value) {
  const auto& constraint = graph.values()[value].constraint;
  if (!constraint) return std::nullopt;
  std::vector<AxisList> dims;
  for (const DimConstraint& dim : constraint->dims) {
    if (dim.is_open) return std::nullopt;
    dims.push_back(dim.axes);
  }
  return Layout(graph.mesh(), std::move(dims), constraint->partial, constraint->invariant);
}

}  // namespace

GraphPlan plan_graph(const Graph& graph, const CostModel& cost, const GraphOptions& options) {
  const auto dims = propagate_dims(graph);
  GraphPlan out;
  for (size_t v = 0; v < graph.values().size(); ++v) {
    const auto& constraint = graph.values()[v].constraint;
    out.layouts.emplace_back(graph.mesh(), dims[v],
                             constraint ? constraint->partial : std::vector<Partial>(),
                             constraint ? constraint->invariant : AxisList());
  }
  std::vector<std::vector<Layout>> available_layouts(graph.values().size());
  std::vector<AxisList> reduced(
      graph.values().size());  // gradients are added up, then reduced once
  for (const GraphNode& node : graph.nodes()) {
    std::vector<Layout> inputs;
    std::vector<int64_t> sizes;
    PropagateOptions how{.training = options.training};
    for (const size_t v : node.inputs) {
      inputs.push_back(out.layouts[v]);
      sizes.push_back(graph.values()[v].element_size);
      how.also.push_back(available_layouts[v]);
      how.reduced_gradient_axes.push_back(reduced[v]);
    }
    for (const size_t v : node.outputs) {
      sizes.push_back(graph.values()[v].element_size);
      how.wanted.push_back(fixed_layout(graph, v));
      how.suggested.emplace_back(Layout(graph.mesh(), dims[v]));
    }
    Propagation found = propagate(node.rule, inputs, sizes, cost, how);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (found.plans[i].num_sends() > 0)
        available_layouts[node.inputs[i]].push_back(found.plans[i].to);
      out.reshard += found.plans[i].seconds();
      AxisList& axes = reduced[node.inputs[i]];
      const AxisList& pending = found.chosen.partial_gradient_axes[i];
      axes.insert(axes.end(), pending.begin(), pending.end());
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      out.layouts[node.outputs[i]] = found.chosen.outputs[i];
    }
    out.compute += found.chosen.compute;
    out.gradients += found.chosen.gradients;
    out.nodes.push_back({std::move(found.chosen), std::move(found.plans)});
    for (const size_t v : node.outputs) {
      std::optional<Layout> end = fixed_layout(graph, v);
      if (!end && graph.is_result(v)) end = out.layouts[v].with_partial({});
      if (!end || *end == out.layouts[v]) continue;
      const GraphValue& value = graph.values()[v];
      out.results.emplace_back(
          v, plan_reshard(out.layouts[v], *end, value.shape, value.element_size, cost));
      out.reshard += out.results.back().second.seconds();
      available_layouts[v].push_back(*end);
    }
  }
  if (options.training) {
    out.reshard *= 2;
    out.compute *= 3;
  } else {
    out.gradients = 0;
  }
  return out;
}

}  // namespace torch_overlap::mesh
