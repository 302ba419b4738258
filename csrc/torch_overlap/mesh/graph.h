#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/propagate.h"
#include "torch_overlap/mesh/rule.h"

namespace torch_overlap::mesh {

// Constraint on one dimension before the layouts of a graph are chosen.
struct DimConstraint {
  AxisList axes;
  bool is_open = true;   // propagation may append axes
  int64_t priority = 0;  // 0 is applied first
};

// Constraint on a value. By default every dimension is open and has no axes.
struct TORCH_OVERLAP_API Constraint {
  std::vector<DimConstraint> dims;
  std::vector<Partial> partial = {};
  AxisList invariant = {};

  static Constraint fixed(const Layout& layout);
};

struct GraphValue {
  std::string name;
  Shape shape;
  int64_t element_size = 4;
  std::optional<Constraint> constraint = std::nullopt;
  bool is_parameter = false;  // its gradient must have the value's layout
};

struct GraphNode {
  OpRule rule;
  std::vector<size_t> inputs;   // value indices
  std::vector<size_t> outputs;  // value indices
};

// Operators in execution order. A value is the output of one node, or an input.
class TORCH_OVERLAP_API Graph {
 public:
  explicit Graph(Mesh mesh) : mesh_(std::move(mesh)) {}

  // Returns the value's index. Errors: a constraint of another rank or with invalid axes.
  size_t add_value(GraphValue value);
  // Returns the indices of the outputs, which are new values. Errors: input values that do not
  // exist, or whose shapes differ from the rule's.
  std::vector<size_t> add_node(OpRule rule, std::vector<size_t> inputs,
                               std::vector<std::string> output_names, int64_t element_size);
  // Constrains a value: it is resharded to the constraint right after it is computed.
  void constrain(size_t value, Constraint constraint);

  const Mesh& mesh() const noexcept { return mesh_; }
  const std::vector<GraphValue>& values() const noexcept { return values_; }
  const std::vector<GraphNode>& nodes() const noexcept { return nodes_; }
  bool is_input(size_t value) const { return producer_.at(value) < 0; }
  bool is_result(size_t value) const { return !is_consumed_.at(value); }  // no node consumes it

 private:
  void check(const GraphValue& value) const;

  Mesh mesh_;
  std::vector<GraphValue> values_;
  std::vector<GraphNode> nodes_;
  std::vector<int64_t> producer_;
  std::vector<bool> is_consumed_;
};

// Returns the axes that every dimension of every value should have. The axes of the constraints are
// propagated along the factors of the operators, forwards and backwards, to a fixed point.
// Constraints are applied in the order of their priorities, up to `max_priority`. Operators that
// only move elements come before those that reduce. A dimension keeps its axes, and more are
// appended if it is open. If operands disagree, their longest common prefix is propagated. Values
// that no constraint reaches stay replicated. Partial axes are left to propagate().
TORCH_OVERLAP_API std::vector<std::vector<AxisList>> propagate_dims(const Graph& graph,
                                                                    int64_t max_priority = 1000);

// Execution of one node: the layouts of its operands and results, and the reshards of its inputs.
struct NodePlan {
  Strategy strategy;
  std::vector<Plan> plans;  // per input
};

struct TORCH_OVERLAP_API GraphPlan {
  std::vector<Layout> layouts;  // per value: its layout when computed (or, for an input, as given)
  std::vector<NodePlan> nodes;
  std::vector<std::pair<size_t, Plan>> results;  // values that are resharded at the end
  // Seconds of a run: reshards, compute, and for a training step also the reduction of gradients.
  double reshard = 0;
  double compute = 0;
  double gradients = 0;

  double seconds() const noexcept { return reshard + compute + gradients; }
  double wire_bytes() const noexcept;
  int64_t num_sends() const noexcept;
};

struct GraphOptions {
  // Also counts the backward pass: two more products, the reshards again, and the reduction of the
  // gradients of values that were whole along axes on which others were sharded.
  bool training = false;
};

// Chooses layouts by propagate_dims(), then plans each operator in turn by propagate(), among the
// layouts that the operands suggest, by cost. A value that was resharded for one operator is
// available in that layout to the later ones. No result stays partial.
TORCH_OVERLAP_API GraphPlan plan_graph(const Graph& graph, const CostModel& cost,
                                       const GraphOptions& options = {});

TORCH_OVERLAP_API std::string explain(const Graph& graph, const GraphPlan& plan);

}  // namespace torch_overlap::mesh
