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

// What is known of one dimension before the layouts of a graph are chosen.
struct DimConstraint {
  AxisList axes;
  bool is_open = true;   // propagation may add axes behind these
  int64_t priority = 0;  // 0 is heard first
};

// What is known of a value. Nothing said: every dimension is open and has no axes.
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
  bool is_parameter = false;  // its gradient is wanted where its value lies
};

struct GraphNode {
  OpRule rule;
  std::vector<size_t> inputs;   // values
  std::vector<size_t> outputs;  // values
};

// Operators in the order in which they run. A value is made by one node, or is an input.
class TORCH_OVERLAP_API Graph {
 public:
  explicit Graph(Mesh mesh) : mesh_(std::move(mesh)) {}

  // Returns the value's number. Errors: a constraint of another rank or with invalid axes.
  size_t add_value(GraphValue value);
  // Returns the numbers of the outputs, which are new values. Errors: values that are not there or
  // have other shapes than the rule.
  std::vector<size_t> add_node(OpRule rule, std::vector<size_t> inputs,
                               std::vector<std::string> output_names, int64_t element_size);
  // Where a value is wanted: it is brought there as soon as it is made.
  void constrain(size_t value, Constraint constraint);

  const Mesh& mesh() const noexcept { return mesh_; }
  const std::vector<GraphValue>& values() const noexcept { return values_; }
  const std::vector<GraphNode>& nodes() const noexcept { return nodes_; }
  bool is_input(size_t value) const { return producer_.at(value) < 0; }
  bool is_result(size_t value) const { return !is_consumed_.at(value); }  // nobody takes it

 private:
  void check(const GraphValue& value) const;

  Mesh mesh_;
  std::vector<GraphValue> values_;
  std::vector<GraphNode> nodes_;
  std::vector<int64_t> producer_;
  std::vector<bool> is_consumed_;
};

// The axes that every dimension of every value should have: those of the constraints, carried along
// the factors of the operators, forwards and backwards, until nothing changes. Constraints are
// heard in the order of their priorities, up to `max_priority`; operators that only pass elements
// on come before those that reduce. A dimension keeps what it has: it gets more axes behind it, if
// it is open; where operands disagree, the longest common beginning goes on. Values that nobody
// talks about stay replicated. Pending axes are left to propagate().
TORCH_OVERLAP_API std::vector<std::vector<AxisList>> propagate_dims(const Graph& graph,
                                                                    int64_t max_priority = 1000);

// How one node runs: what it needs, from where, and what it leaves.
struct NodePlan {
  Strategy strategy;
  std::vector<Plan> plans;  // per input
};

struct TORCH_OVERLAP_API GraphPlan {
  std::vector<Layout> layouts;  // per value, as it is made (or, an input, as it is given)
  std::vector<NodePlan> nodes;
  std::vector<std::pair<size_t, Plan>> results;  // values that end otherwise than they are made
  // Seconds of a run: moving, computing; of a training step also the gradients.
  double reshard = 0;
  double compute = 0;
  double gradients = 0;

  double seconds() const noexcept { return reshard + compute + gradients; }
  double wire_bytes() const noexcept;
  int64_t num_sends() const noexcept;
};

struct GraphOptions {
  // Also count the backward pass: twice the products, the reshards again, and the reduction of the
  // gradients of values that were whole where others were sharded.
  bool training = false;
};

// Layouts by propagate_dims(), then each operator in turn by propagate(): what the operands
// suggest, by cost. A value that was brought to some layout for one operator is there for the next
// ones. No result stays pending.
TORCH_OVERLAP_API GraphPlan plan_graph(const Graph& graph, const CostModel& cost,
                                       const GraphOptions& options = {});

TORCH_OVERLAP_API std::string explain(const Graph& graph, const GraphPlan& plan);

}  // namespace torch_overlap::mesh
