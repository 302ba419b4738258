#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/auto_shard.h"
#include "torch_overlap/mesh/graph.h"
#include "torch_overlap/python/bind_mesh.h"

namespace torch_overlap::python {
namespace {

using mesh::AutoShard;
using mesh::Constraint;
using mesh::CostModel;
using mesh::Graph;
using mesh::GraphPlan;
using mesh::Layout;
using mesh::Shape;

// (axes, is_open, priority) per dimension: the contents of a DimSpec.
using DimSpecs = std::vector<std::tuple<py::object, bool, int64_t>>;

std::optional<Constraint> to_constraint(const mesh::Mesh& mesh, const py::object& value) {
  if (value.is_none()) return std::nullopt;
  if (py::isinstance<Layout>(value)) return Constraint::fixed(value.cast<Layout>());
  Constraint out;
  for (const auto& [axes, is_open, priority] : value.cast<DimSpecs>()) {
    out.dims.push_back({to_axes(mesh, axes), is_open, priority});
  }
  return out;
}

size_t add_value(Graph& graph, const std::string& name, const Shape& shape, int64_t element_size,
                 const py::object& constraint, bool is_parameter) {
  return graph.add_value(
      {name, shape, element_size, to_constraint(graph.mesh(), constraint), is_parameter});
}

// Returns (operator, step) in execution order: the reshards before a node, then those of its
// outputs.
py::list collectives(const Graph& graph, const GraphPlan& plan) {
  py::list out;
  const auto add = [&](const std::string& what, const mesh::Plan& one) {
    for (const auto& step : one.steps) {
      if (step.sends()) out.append(py::make_tuple(what, step));
    }
  };
  for (size_t n = 0; n < plan.nodes.size(); ++n) {
    const mesh::GraphNode& node = graph.nodes()[n];
    for (const mesh::Plan& one : plan.nodes[n].plans) add(node.rule.op, one);
    for (const auto& [value, one] : plan.results) {
      const bool is_own =
          std::find(node.outputs.begin(), node.outputs.end(), value) != node.outputs.end();
      if (is_own) add(graph.values()[value].name, one);
    }
  }
  return out;
}

}  // namespace

void register_mesh_graphs(py::module_& module) {
  py::class_<GraphPlan>(
      module, "GraphPlan",
      "Layouts of all values of a graph, the strategies of its nodes, and their cost.")
      .def_readonly(
          "layouts", &GraphPlan::layouts,
          "List of the layout of each value when it is computed, or, for an input, as given.")
      .def_property_readonly(
          "strategies",
          [](const GraphPlan& self) {
            py::list out;
            for (const auto& node : self.nodes) out.append(node.strategy);
            return out;
          },
          "List of the Strategy of each node.")
      .def_property_readonly(
          "plans",
          [](const GraphPlan& self) {
            py::list out;
            for (const auto& node : self.nodes) out.append(node.plans);
            return out;
          },
          "List, per node, of the Plans that reshard its inputs.")
      .def_readonly(
          "results", &GraphPlan::results,
          "List of (value, Plan) for the values that are resharded after they are computed.")
      .def_readonly("reshard", &GraphPlan::reshard, "Seconds of reshards.")
      .def_readonly("compute", &GraphPlan::compute, "Seconds of compute.")
      .def_readonly("gradients", &GraphPlan::gradients,
                    "Seconds of gradient reductions; 0 unless planned for training.")
      .def_property_readonly("seconds", &GraphPlan::seconds,
                             "Seconds in total: reshard + compute + gradients.")
      .def_property_readonly("wire_bytes", &GraphPlan::wire_bytes,
                             "Bytes that a rank sends in the forward pass.")
      .def_property_readonly("num_sends", &GraphPlan::num_sends,
                             "Number of collectives in the forward pass.")
      .def("__repr__", [](const GraphPlan& self) {
        return "GraphPlan(" + mesh::show_seconds(self.seconds()) + ")";
      });

  py::class_<AutoShard>(module, "AutoShard",
                        "The cheapest plan of a graph, and the plans that it was compared with.")
      .def_readonly("plan", &AutoShard::plan, "The cheapest GraphPlan.")
      .def_property_readonly(
          "alternatives",
          [](const AutoShard& self) {
            py::list out;
            for (const auto& one : self.alternatives)
              out.append(py::make_tuple(one.name, one.plan));
            return out;
          },
          "List of (name, GraphPlan), cheapest first.")
      .def("explain", &AutoShard::explain, py::arg("graph"),
           "Returns a report on `graph`: the chosen plan, its margin over the alternatives, and "
           "the time of each.");

  py::class_<Graph>(module, "Graph",
                    "Operators in execution order, over values that are identified by index.")
      .def(py::init<mesh::Mesh>(), py::arg("mesh"))
      .def(
          "add_value", &add_value, py::arg("name"), py::arg("shape"), py::arg("element_size") = 4,
          py::arg("constraint") = py::none(), py::arg("is_parameter") = false,
          "Adds an input of `shape`, with elements of `element_size` bytes, and returns its index. "
          "`constraint`: the Layout that it has, or (axes, is_open, priority) for each dimension: "
          "an open dimension may get more axes, and priority 0 is applied first. None leaves every "
          "dimension open. The gradient of a value with `is_parameter` gets the value's layout.")
      .def("add_node", &Graph::add_node, py::arg("rule"), py::arg("inputs"),
           py::arg("output_names"), py::arg("element_size") = 4,
           "Adds an operator with this OpRule. Returns the indices of its outputs, which are new "
           "values with these `output_names`. `inputs` are value indices. Raises InvalidValueError "
           "for a value that does not exist, or whose shape differs from the rule's.")
      .def(
          "constrain",
          [](Graph& self, size_t value, const py::object& constraint) {
            const auto given = to_constraint(self.mesh(), constraint);
            TORCH_OVERLAP_CHECK(given.has_value(), kType,
                                "Graph.constrain: expected a layout, got None");
            TORCH_OVERLAP_CHECK(value < self.values().size(), kValue,
                                "Graph.constrain: expected one of ", self.values().size(),
                                " values, got ", value);
            self.constrain(value, *given);
          },
          py::arg("value"), py::arg("constraint"),
          "Constrains a `value`: it is resharded to `constraint`, as in add_value(), right after "
          "it is computed.")
      .def_property_readonly("mesh", &Graph::mesh, "The mesh.")
      .def_property_readonly(
          "values",
          [](const Graph& self) {
            py::list out;
            for (const auto& value : self.values()) {
              out.append(py::make_tuple(value.name, py::tuple(py::cast(value.shape))));
            }
            return out;
          },
          "List of the (name, shape) of each value.")
      .def(
          "dims",
          [](const Graph& self, int64_t max_priority) {
            py::list out;
            for (const auto& dims : mesh::propagate_dims(self, max_priority)) {
              out.append(Layout(self.mesh(), dims));
            }
            return out;
          },
          py::arg("max_priority") = 1000,
          "Returns the layouts of all values that follow from the constraints of up to "
          "`max_priority`, propagated forwards and backwards through the operators.")
      .def(
          "plan",
          [](const Graph& self, const CostModel& cost, bool training) {
            return mesh::plan_graph(self, cost, {.training = training});
          },
          py::arg("cost"), py::arg("training") = false, py::call_guard<py::gil_scoped_release>(),
          "Returns a GraphPlan: layouts by dims(), then the cheapest strategy of each operator in "
          "turn. With `training` the cost includes the backward pass.")
      .def(
          "auto_shard",
          [](const Graph& self, const CostModel& cost, bool training, size_t width, size_t branch) {
            return mesh::auto_shard(self, cost, {training, width, branch});
          },
          py::arg("cost"), py::arg("training") = false, py::arg("width") = 24,
          py::arg("branch") = 12, py::call_guard<py::gil_scoped_release>(),
          "Returns an AutoShard: the result of a beam search over the layouts of the inputs "
          "without a constraint. `width`: number of partial choices kept at a time. `branch`: "
          "number of strategies of an operator tried for each. With `training` the cost includes "
          "the backward pass.")
      .def(
          "explain",
          [](const Graph& self, const GraphPlan& plan) { return mesh::explain(self, plan); },
          py::arg("plan"),
          "Returns a report on `plan`, with one line per value and per collective.")
      .def("collectives", &collectives, py::arg("plan"),
           "Returns a list of (operator, Step) for each collective of `plan`, in execution order.");
}

}  // namespace torch_overlap::python
