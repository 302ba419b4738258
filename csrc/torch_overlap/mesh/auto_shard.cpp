#include "torch_overlap/mesh/auto_shard.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {
namespace {

Layout layout_of(const Graph& graph, const Constraint& constraint) {
  std::vector<AxisList> dims;
  for (const DimConstraint& dim : constraint.dims) dims.push_back(dim.axes);
  return Layout(graph.mesh(), std::move(dims), constraint.partial, constraint.invariant);
}

// One decision, linked to those before it: partial choices share their common prefix.
struct Choice {
  std::shared_ptr<const Choice> before;
  Strategy strategy;
};

struct BeamState {
  std::vector<std::optional<Layout>> layouts;  // per value: as computed, or as first consumed
  std::vector<std::vector<Layout>> available_layouts;
  std::vector<AxisList> reduced;  // per value: axes along which its gradient is reduced
  std::shared_ptr<const Choice> last;
  double seconds = 0;
  double deferred_seconds = 0;  // cost of partial values that no operator has consumed yet
};

class Beam {
 public:
  Beam(const Graph& graph, const CostModel& cost, const AutoShardOptions& options)
      : graph_(graph), cost_(cost), options_(options), last_use_(graph.values().size(), -1) {
    for (size_t n = 0; n < graph.nodes().size(); ++n) {
      for (const size_t v : graph.nodes()[n].inputs) last_use_[v] = static_cast<int64_t>(n);
    }
  }

  std::vector<BeamState> run() {
    BeamState start;
    start.available_layouts.resize(graph_.values().size());
    start.reduced.resize(graph_.values().size());
    for (const GraphValue& value : graph_.values()) {
      start.layouts.emplace_back();
      if (value.constraint) start.layouts.back() = layout_of(graph_, *value.constraint);
    }
    for (size_t v = 0; v < graph_.values().size(); ++v) {
      if (!graph_.is_input(v)) start.layouts[v].reset();
    }
    std::vector<BeamState> beam{std::move(start)};
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      std::vector<BeamState> next;
      for (const BeamState& beam_state : beam) expand(beam_state, n, next);
      beam = best(std::move(next), n);
    }
    return beam;
  }

 private:
  void expand(const BeamState& beam_state, size_t n, std::vector<BeamState>& next) const {
    const GraphNode& node = graph_.nodes()[n];
    PropagateOptions how{.training = options_.training, .explore = true};
    std::vector<Layout> inputs;
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const size_t v = node.inputs[i];
      const auto& layout = beam_state.layouts[v];
      if (!layout) how.free_inputs |= uint64_t{1} << i;
      inputs.push_back(layout ? *layout
                              : Layout::replicated(graph_.mesh(), graph_.values()[v].shape.size()));
      sizes.push_back(graph_.values()[v].element_size);
      how.also.push_back(beam_state.available_layouts[v]);
      how.reduced_gradient_axes.push_back(beam_state.reduced[v]);
    }
    for (const size_t v : node.outputs) {
      sizes.push_back(graph_.values()[v].element_size);
      const auto& constraint = graph_.values()[v].constraint;
      how.wanted.push_back(constraint ? std::optional(layout_of(graph_, *constraint))
                                      : std::nullopt);
    }
    const bool is_wanted = std::any_of(how.wanted.begin(), how.wanted.end(),
                                       [](const auto& wanted) { return wanted.has_value(); });
    const bool is_end = std::any_of(node.outputs.begin(), node.outputs.end(),
                                    [&](size_t v) { return graph_.is_result(v); });
    std::vector<Strategy> found = propagate(node.rule, inputs, sizes, cost_, how).strategies;
    if (found.size() > options_.branch)
      found.erase(found.begin() + static_cast<int64_t>(options_.branch), found.end());
    for (Strategy& strategy : found) {
      BeamState extended = beam_state;
      for (size_t i = 0; i < node.inputs.size(); ++i) {
        const size_t v = node.inputs[i];
        const AxisList& pending = strategy.partial_gradient_axes[i];
        extended.reduced[v].insert(extended.reduced[v].end(), pending.begin(), pending.end());
        if (!extended.layouts[v]) {  // left whole: making it partial needs no communication
          extended.layouts[v] = strategy.inputs[i].with_partial({});
        } else if (!(*extended.layouts[v] == strategy.inputs[i])) {
          extended.available_layouts[v].push_back(strategy.inputs[i]);
        }
      }
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        const size_t v = node.outputs[i];
        extended.layouts[v] = strategy.outputs[i];
        if (how.wanted[i] && !(*how.wanted[i] == strategy.outputs[i])) {
          extended.available_layouts[v].push_back(*how.wanted[i]);
        }
      }
      const double after = strategy.after;
      strategy.after = 0;
      extended.seconds += strategy.seconds(options_.training);
      // The reshard to a wanted layout is charged now. A partial value is charged in full if it is
      // a result, otherwise in part.
      const double output_seconds = after * (options_.training ? 2 : 1);
      extended.deferred_seconds = 0;
      if (is_wanted || is_end) {
        extended.seconds += is_wanted ? output_seconds : output_seconds / kPartialReduceShare;
      } else {
        extended.deferred_seconds = output_seconds;
      }
      extended.last = std::make_shared<Choice>(Choice{beam_state.last, std::move(strategy)});
      next.push_back(std::move(extended));
    }
  }

  // Returns the n cheapest partial choices, one for each combination of layouts of the values that
  // are still needed.
  std::vector<BeamState> best(std::vector<BeamState> all, size_t n) const {
    std::stable_sort(all.begin(), all.end(), [](const BeamState& a, const BeamState& b) {
      return a.seconds + a.deferred_seconds < b.seconds + b.deferred_seconds;
    });
    std::vector<BeamState> out;
    std::unordered_map<std::string, bool> seen;
    for (BeamState& one : all) {
      std::string key;
      for (size_t v = 0; v < one.layouts.size(); ++v) {
        const bool is_live = last_use_[v] > static_cast<int64_t>(n) || last_use_[v] < 0;
        if (!is_live || !one.layouts[v]) continue;
        key += concat(v, one.layouts[v]->str(), ";");
        for (const Layout& other : one.available_layouts[v]) key += other.str();
      }
      if (!seen.emplace(std::move(key), true).second) continue;
      out.push_back(std::move(one));
      if (out.size() == options_.width) break;
    }
    return out;
  }

  const Graph& graph_;
  const CostModel& cost_;
  const AutoShardOptions& options_;
  std::vector<int64_t> last_use_;
};

// Returns the graph with its inputs constrained to these layouts, so that planning it from the
// start gives its real cost.
Graph with_inputs(const Graph& graph, const std::vector<std::optional<Layout>>& layouts) {
  Graph out = graph;
  for (size_t v = 0; v < graph.values().size(); ++v) {
    if (graph.is_input(v) && layouts[v]) out.constrain(v, Constraint::fixed(*layouts[v]));
  }
  return out;
}

Alternative planned_alternative(std::string name, const Graph& graph, const CostModel& cost,
                                const AutoShardOptions& options) {
  Alternative out{std::move(name), {}, plan_graph(graph, cost, {.training = options.training})};
  for (const NodePlan& node : out.plan.nodes) out.roles.push_back(node.strategy.roles);
  return out;
}

// Returns the plan of a partial choice, operator by operator as it was searched.
Alternative alternative_of_state(std::string name, const Graph& graph, const BeamState& beam_state,
                                 const CostModel& cost, const AutoShardOptions& options) {
  std::vector<const Strategy*> strategies;
  for (const Choice* choice = beam_state.last.get(); choice != nullptr;
       choice = choice->before.get()) {
    strategies.push_back(&choice->strategy);
  }
  std::reverse(strategies.begin(), strategies.end());
  Alternative out{std::move(name), {}, {}};
  GraphPlan& plan = out.plan;
  for (size_t v = 0; v < graph.values().size(); ++v) {
    const auto& layout = beam_state.layouts[v];
    plan.layouts.push_back(
        layout ? *layout : Layout::replicated(graph.mesh(), graph.values()[v].shape.size()));
  }
  std::vector<std::vector<Layout>> available_layouts(graph.values().size());
  const auto plan_to = [&](size_t v, const Layout& to) {
    const GraphValue& value = graph.values()[v];
    Plan best = plan_reshard(plan.layouts[v], to, value.shape, value.element_size, cost);
    for (const Layout& from : available_layouts[v]) {
      Plan other = plan_reshard(from, to, value.shape, value.element_size, cost);
      if (other.seconds() < best.seconds()) best = std::move(other);
    }
    plan.reshard += best.seconds();
    if (best.num_sends() > 0) available_layouts[v].push_back(to);
    return best;
  };
  for (size_t n = 0; n < graph.nodes().size(); ++n) {
    NodePlan node{*strategies[n], {}};
    for (size_t i = 0; i < graph.nodes()[n].inputs.size(); ++i) {
      node.plans.push_back(plan_to(graph.nodes()[n].inputs[i], node.strategy.inputs[i]));
    }
    plan.compute += node.strategy.compute;
    plan.gradients += node.strategy.gradients;
    out.roles.push_back(node.strategy.roles);
    plan.nodes.push_back(std::move(node));
    for (const size_t v : graph.nodes()[n].outputs) {
      const auto& constraint = graph.values()[v].constraint;
      if (!constraint && !graph.is_result(v)) continue;
      const Layout to =
          constraint ? layout_of(graph, *constraint) : plan.layouts[v].with_partial({});
      if (!(to == plan.layouts[v])) plan.results.emplace_back(v, plan_to(v, to));
    }
  }
  plan.reshard *= options.training ? 2 : 1;
  plan.compute *= options.training ? 3 : 1;
  plan.gradients *= options.training ? 1 : 0;
  return out;
}

// Shards the first dimension of every value that is not a parameter over all axes that divide it.
std::vector<std::optional<Layout>> data_parallel(const Graph& graph) {
  std::vector<std::optional<Layout>> out(graph.values().size());
  for (size_t v = 0; v < out.size(); ++v) {
    const GraphValue& value = graph.values()[v];
    if (!graph.is_input(v) || value.constraint) continue;
    std::vector<AxisList> dims(value.shape.size());
    if (!value.is_parameter && !dims.empty()) {
      for (const Axis& axis : graph.mesh().axes()) {
        AxisList extended = dims[0];
        extended.push_back(graph.mesh().axis(axis.name));
        if (is_even(value.shape[0], extended)) dims[0] = extended;
      }
    }
    out[v] = Layout(graph.mesh(), std::move(dims));
  }
  return out;
}

std::vector<std::optional<Layout>> replicated(const Graph& graph) {
  std::vector<std::optional<Layout>> out(graph.values().size());
  for (size_t v = 0; v < out.size(); ++v) {
    if (!graph.is_input(v) || graph.values()[v].constraint) continue;
    out[v] = Layout::replicated(graph.mesh(), graph.values()[v].shape.size());
  }
  return out;
}

}  // namespace

AutoShard auto_shard(const Graph& graph, const CostModel& cost, const AutoShardOptions& options) {
  TORCH_OVERLAP_CHECK(!graph.nodes().empty(), kValue,
                      "auto_shard: expected a graph of at least one operator, got none");
  TORCH_OVERLAP_CHECK(options.width >= 1 && options.branch >= 1, kValue,
                      "auto_shard: expected a width and a branch of at least 1, got ",
                      options.width, " and ", options.branch);
  AutoShard out;
  const std::vector<BeamState> found = Beam(graph, cost, options).run();
  for (size_t i = 0; i < std::min<size_t>(found.size(), 4); ++i) {
    out.alternatives.push_back(
        alternative_of_state(concat("search ", i + 1), graph, found[i], cost, options));
  }
  out.alternatives.push_back(planned_alternative(
      "data parallel", with_inputs(graph, data_parallel(graph)), cost, options));
  out.alternatives.push_back(planned_alternative(
      "replicated inputs", with_inputs(graph, replicated(graph)), cost, options));
  std::stable_sort(out.alternatives.begin(), out.alternatives.end(),
                   [](const Alternative& a, const Alternative& b) {
                     return a.plan.seconds() < b.plan.seconds();
                   });
  out.plan = out.alternatives.front().plan;
  return out;
}

std::string AutoShard::explain(const Graph& graph) const {
  const Alternative& best = alternatives.front();
  std::string out = concat("chosen: ", best.name, ", ", torch_overlap::mesh::explain(graph, plan));
  for (size_t i = 1; i < alternatives.size(); ++i) {
    const Alternative& other = alternatives[i];
    out +=
        concat("not ", other.name, ": ", show_seconds(other.plan.seconds()), " (moving ",
               show_seconds(other.plan.reshard), ", computing ", show_seconds(other.plan.compute),
               ", gradients ", show_seconds(other.plan.gradients), ", ", other.plan.num_sends(),
               " collectives)");
    constexpr size_t kMaxShown = 3;
    size_t differences = 0;
    for (size_t n = 0; n < other.roles.size(); ++n) {
      if (other.roles[n] == best.roles[n] || ++differences > kMaxShown) continue;
      out += concat(differences == 1 ? ": " : ", ", graph.nodes()[n].rule.op, " by ",
                    other.roles[n], " instead of ", best.roles[n]);
    }
    if (differences > kMaxShown) out += concat(" and ", differences - kMaxShown, " more");
    out += '\n';
  }
  return out;
}

}  // namespace torch_overlap::mesh
