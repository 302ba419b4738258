#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
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

// Per dimension (axes, is_open, priority): what a DimSpec holds.
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

// (operator, step) in the order in which they run: before a node, then for its outputs.
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
  py::class_<GraphPlan>(module, "GraphPlan", "A whole graph laid out, and what that costs.")
      .def_readonly("layouts", &GraphPlan::layouts, "Per value, as it is made or given.")
      .def_property_readonly(
          "strategies",
          [](const GraphPlan& self) {
            py::list out;
            for (const auto& node : self.nodes) out.append(node.strategy);
            return out;
          },
          "Per node.")
      .def_property_readonly(
          "plans",
          [](const GraphPlan& self) {
            py::list out;
            for (const auto& node : self.nodes) out.append(node.plans);
            return out;
          },
          "Per node, per input.")
      .def_readonly("results", &GraphPlan::results,
                    "(value, plan) where one ends otherwise than it is made.")
      .def_readonly("reshard", &GraphPlan::reshard, "Seconds of moving.")
      .def_readonly("compute", &GraphPlan::compute, "Seconds of computing.")
      .def_readonly("gradients", &GraphPlan::gradients, "Seconds of reducing gradients.")
      .def_property_readonly("seconds", &GraphPlan::seconds, "All.")
      .def_property_readonly("wire_bytes", &GraphPlan::wire_bytes, "What a rank sends, forward.")
      .def_property_readonly("num_sends", &GraphPlan::num_sends, "How many collectives, forward.")
      .def("__repr__", [](const GraphPlan& self) {
        return "GraphPlan(" + mesh::show_seconds(self.seconds()) + ")";
      });

  py::class_<AutoShard>(module, "AutoShard",
                        "The cheapest layouts of a graph, and those it was compared with.")
      .def_readonly("plan", &AutoShard::plan, "The cheapest.")
      .def_property_readonly(
          "alternatives",
          [](const AutoShard& self) {
            py::list out;
            for (const auto& one : self.alternatives)
              out.append(py::make_tuple(one.name, one.plan));
            return out;
          },
          "(name, plan), the cheapest first.")
      .def("explain", &AutoShard::explain, py::arg("graph"), "Which one, by how much, and why.");

  py::class_<Graph>(module, "Graph",
                    "Operators in the order in which they run, over numbered values.")
      .def(py::init<mesh::Mesh>(), py::arg("mesh"))
      .def("add_value", &add_value, py::arg("name"), py::arg("shape"), py::arg("element_size") = 4,
           py::arg("constraint") = py::none(), py::arg("is_parameter") = false,
           "An input; its number. `constraint`: a Layout that it has, or per dimension (axes, "
           "is_open, priority).")
      .def("add_node", &Graph::add_node, py::arg("rule"), py::arg("inputs"),
           py::arg("output_names"), py::arg("element_size") = 4, "The numbers of its outputs.")
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
          py::arg("value"), py::arg("constraint"), "Where a value is wanted.")
      .def_property_readonly("mesh", &Graph::mesh, "Its mesh.")
      .def_property_readonly(
          "values",
          [](const Graph& self) {
            py::list out;
            for (const auto& value : self.values()) {
              out.append(py::make_tuple(value.name, py::tuple(py::cast(value.shape))));
            }
            return out;
          },
          "(name, shape) of each value.")
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
          "Layouts of all values: the constraints, carried along the operators both ways.")
      .def(
          "plan",
          [](const Graph& self, const CostModel& cost, bool training) {
            return mesh::plan_graph(self, cost, {.training = training});
          },
          py::arg("cost"), py::arg("training") = false, py::call_guard<py::gil_scoped_release>(),
          "dims(), then each operator by cost.")
      .def(
          "auto_shard",
          [](const Graph& self, const CostModel& cost, bool training, size_t width, size_t branch) {
            return mesh::auto_shard(self, cost, {training, width, branch});
          },
          py::arg("cost"), py::arg("training") = false, py::arg("width") = 24,
          py::arg("branch") = 12, py::call_guard<py::gil_scoped_release>(),
          "A search over the layouts of its free inputs.")
      .def(
          "explain",
          [](const Graph& self, const GraphPlan& plan) { return mesh::explain(self, plan); },
          py::arg("plan"), "A line a value and a collective.")
      .def("collectives", &collectives, py::arg("plan"),
           "(operator, step) of each collective, in order.");
}

}  // namespace torch_overlap::python
