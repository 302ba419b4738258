#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/plan.h"
#include "torch_overlap/mesh/simulate.h"
#include "torch_overlap/python/bind_mesh.h"

namespace torch_overlap::python {
namespace {

using mesh::Array;
using mesh::Layout;
using mesh::Locals;
using mesh::Plan;
using mesh::Shape;
using mesh::Step;

using NumpyArray = py::array_t<double, py::array::c_style | py::array::forcecast>;

// Converts an array of real numbers, or what numpy makes one of.
Array to_array(std::string_view op, std::string_view argument, const py::object& from) {
  const auto given = py::array::ensure(from);
  TORCH_OVERLAP_CHECK(given && given.dtype().kind() != 'c', kType, op,
                      ": expected real numbers for ", argument, ", got ",
                      given ? py::str(given.dtype()).cast<std::string>() : "no array",
                      "; call it for the real and for the imaginary part of complex ones");
  const auto numbers = NumpyArray::ensure(given);
  TORCH_OVERLAP_CHECK(numbers, kType, op, ": expected real numbers for ", argument, ", got ",
                      py::str(given.dtype()).cast<std::string>());
  Array out;
  for (py::ssize_t d = 0; d < numbers.ndim(); ++d) out.shape.push_back(numbers.shape(d));
  out.data.assign(numbers.data(), numbers.data() + numbers.size());
  return out;
}

NumpyArray from_array(const Array& from) {
  NumpyArray out(std::vector<py::ssize_t>(from.shape.begin(), from.shape.end()));
  std::copy(from.data.begin(), from.data.end(), out.mutable_data());
  return out;
}

Locals to_locals(std::string_view op, const std::vector<py::object>& from) {
  Locals out;
  for (const py::object& one : from) out.push_back(to_array(op, "locals", one));
  return out;
}

py::tuple step_state(const Step& step) {
  return py::make_tuple(static_cast<int>(step.kind), step.axes, step.dim, step.from_dim,
                        static_cast<int>(step.reduce), step.sources, step.before, step.after,
                        step.ranks, step.bytes, step.wire_bytes, step.seconds);
}

Step step_of_state(const py::tuple& state) {
  TORCH_OVERLAP_CHECK(state.size() == 12, kValue, "Step: expected 12 values of pickle, got ",
                      state.size());
  return {.kind = static_cast<mesh::StepKind>(state[0].cast<int>()),
          .axes = state[1].cast<mesh::AxisList>(),
          .dim = state[2].cast<int64_t>(),
          .from_dim = state[3].cast<int64_t>(),
          .reduce = static_cast<mesh::ReduceKind>(state[4].cast<int>()),
          .sources = state[5].cast<mesh::AxisList>(),
          .before = state[6].cast<Layout>(),
          .after = state[7].cast<Layout>(),
          .ranks = state[8].cast<int64_t>(),
          .bytes = state[9].cast<double>(),
          .wire_bytes = state[10].cast<double>(),
          .seconds = state[11].cast<double>()};
}

Plan plan_of_state(const py::tuple& state) {
  const auto [from, to, shape, element_size, steps] =
      state.cast<std::tuple<Layout, Layout, Shape, int64_t, std::vector<Step>>>();
  return {.from = from, .to = to, .shape = shape, .element_size = element_size, .steps = steps};
}

py::list from_locals(const Locals& from) {
  py::list out;
  for (const Array& one : from) out.append(from_array(one));
  return out;
}

}  // namespace

void register_mesh_plans(py::module_& module) {
  py::class_<Step>(module, "Step", "One operation of a plan, on every rank's local tensor.")
      .def_property_readonly(
          "kind", [](const Step& self) { return std::string(to_string(self.kind)); },
          "Kind of the step: slice, all_gather, all_reduce, reduce_scatter, all_to_all, permute, "
          "make_partial or cast.")
      .def_property_readonly(
          "axes", [](const Step& self) { return axis_names(self.before.mesh(), self.axes); },
          "Names of the axes of the group, Mesh.group(rank, axes).")
      .def_property_readonly(
          "sources", [](const Step& self) { return axis_names(self.before.mesh(), self.sources); },
          "permute: `axes` in another order. A rank gets the tensor of the group member whose "
          "position is the rank's own position in this order.")
      .def_readonly("dim", &Step::dim,
                    "Dimension that is split, or concatenated by all_gather; -1 if none.")
      .def_readonly("from_dim", &Step::from_dim,
                    "all_to_all: dimension that is concatenated; otherwise -1.")
      .def_property_readonly(
          "reduce", [](const Step& self) { return std::string(to_string(self.reduce)); },
          "Reduction: sum, avg, max, min or product.")
      .def_readonly("before", &Step::before, "Layout before the step.")
      .def_readonly("after", &Step::after, "Layout after the step.")
      .def_readonly("ranks", &Step::ranks, "Number of ranks in a group.")
      .def_readonly("bytes", &Step::bytes, "Bytes of the larger of a rank's input and output.")
      .def_readonly("wire_bytes", &Step::wire_bytes, "Bytes that a rank sends.")
      .def_readonly("seconds", &Step::seconds, "Seconds by the cost model.")
      .def_property_readonly("sends", &Step::sends, "True if the step communicates.")
      .def(py::pickle(&step_state, &step_of_state))
      .def("__repr__", &Step::str);

  py::class_<Plan>(module, "Plan",
                   "The steps that reshard a tensor from one layout to another. Immutable.")
      .def_readonly("from_layout", &Plan::from, "Layout of the input.")
      .def_readonly("to_layout", &Plan::to, "Layout of the result.")
      .def_property_readonly(
          "shape", [](const Plan& self) { return py::tuple(py::cast(self.shape)); },
          "Global shape.")
      .def_readonly("element_size", &Plan::element_size, "Bytes per element.")
      .def_readonly("steps", &Plan::steps, "List of the Steps, in order.")
      .def_property_readonly("seconds", &Plan::seconds, "Seconds by the cost model.")
      .def_property_readonly("wire_bytes", &Plan::wire_bytes, "Bytes that a rank sends.")
      .def_property_readonly("num_sends", &Plan::num_sends, "Number of steps that communicate.")
      .def("explain", &Plan::explain,
           "Returns a report with one line per step: the operation, its axes, number of ranks, "
           "bytes, time and resulting layout.")
      .def(py::pickle(
          [](const Plan& self) {
            return py::make_tuple(self.from, self.to, self.shape, self.element_size, self.steps);
          },
          &plan_of_state))
      .def("__repr__", [](const Plan& self) {
        return "Plan(" + self.from.str() + " -> " + self.to.str() + ", " +
               std::to_string(self.steps.size()) + " steps)";
      });

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("plan_reshard", &mesh::plan_reshard, py::arg("from_layout"), py::arg("to_layout"),
             py::arg("shape"), py::arg("element_size"), py::arg("cost"), no_gil,
             "Returns the cheapest Plan by `cost` that reshards a tensor of global shape `shape`, "
             "with elements of `element_size` bytes, from `from_layout` to `to_layout`. "
             "Deterministic: every rank gets the same plan. Raises InvalidValueError for layouts "
             "of two meshes, or a shape of another number of dimensions.");
  module.def("greedy_reshard", &mesh::greedy_reshard, py::arg("from_layout"), py::arg("to_layout"),
             py::arg("shape"), py::arg("element_size"), py::arg("cost"), no_gil,
             "Returns the Plan that one would write by hand. It is the baseline of plan_reshard, "
             "which is never worse by `cost`. The arguments are those of plan_reshard.");
  module.def(
      "distribute",
      [](const py::object& array, const Layout& layout) {
        return from_locals(mesh::distribute(to_array("distribute", "array", array), layout));
      },
      py::arg("array"), py::arg("layout"),
      "Returns the local arrays of a global `array` (converted to float64) in `layout`, one per "
      "mesh index. Raises InvalidTypeError if the array is complex.");
  module.def(
      "collect",
      [](const std::vector<py::object>& locals, const Layout& layout, const Shape& shape) {
        return from_array(mesh::collect(to_locals("collect", locals), layout, shape));
      },
      py::arg("locals"), py::arg("layout"), py::arg("shape"),
      "Returns the global array of this `shape` from the `locals` of all mesh indices in `layout`. "
      "Raises InvalidValueError if copies are not bitwise equal, or a local shape does not fit, "
      "and "
      "InvalidTypeError if an array is complex.");
  module.def(
      "simulate",
      [](const Plan& plan, const std::vector<py::object>& locals) {
        return from_locals(mesh::simulate(plan, to_locals("simulate", locals)));
      },
      py::arg("plan"), py::arg("locals"),
      "Returns the local arrays after `plan`, given the `locals` of all mesh indices. Raises "
      "InvalidTypeError if one is complex.");
}

}  // namespace torch_overlap::python
