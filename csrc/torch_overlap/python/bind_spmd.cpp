#include <pybind11/stl.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/python/bind_mesh.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/spmd/mesh_comms.h"

namespace torch_overlap::python {
namespace {

using spmd::MeshComms;
using MeshCommsPtr = std::shared_ptr<MeshComms>;

// Converts "dp,tp", an axis, or a sequence of axes.
mesh::AxisList to_set(const mesh::Mesh& mesh, py::handle value) {
  if (!py::isinstance<py::str>(value)) return to_axes(mesh, value);
  mesh::AxisList out;
  for (const auto& name : split_string(value.cast<std::string>(), ',')) {
    out.push_back(mesh.axis(name));
  }
  return out;
}

std::vector<mesh::AxisList> to_sets(const mesh::Mesh& mesh, const py::args& values) {
  std::vector<mesh::AxisList> out;
  for (const py::handle value : values) out.push_back(to_set(mesh, value));
  return out;
}

MeshCommsPtr connect(const mesh::Mesh& mesh, const std::shared_ptr<TorchComm>& comm,
                     const std::string& name, const mesh::CostModel& cost, const py::object& sets) {
  std::vector<mesh::AxisList> lists;
  TORCH_OVERLAP_CHECK(!py::isinstance<py::str>(sets), kType,
                      "connect: expected sets as a list of sets of axes, got a string; put it into "
                      "a list");
  if (!sets.is_none()) {
    for (const py::handle value : py::reinterpret_borrow<py::iterable>(sets)) {
      lists.push_back(to_set(mesh, value));
    }
  }
  return without_gil([&] { return MeshComms::connect(mesh, comm, name, cost, lists); });
}

}  // namespace

void register_spmd(py::module_& module) {
  py::class_<MeshComms, MeshCommsPtr>(
      module, "MeshComms", py::dynamic_attr(),
      R"(A mesh, this rank's position in it, and a communicator for each set of its axes.

torch_overlap.mesh.connect creates it, collectively.)")
      .def_property_readonly("mesh", &MeshComms::mesh, "The Mesh.")
      .def_property_readonly("name", &MeshComms::name,
                             "Name, unique among the live meshes of the process.")
      .def_property_readonly("cost", &MeshComms::cost, "The CostModel of the plans.")
      .def_property_readonly("comm", &MeshComms::comm, "The communicator of all ranks.")
      .def_property_readonly("rank", &MeshComms::rank,
                             "Rank of this process in `comm` and in the mesh.")
      .def_property_readonly("index", &MeshComms::index,
                             "Position of this rank in the mesh, row-major.")
      .def(
          "coordinate",
          [](const MeshComms& self, const py::object& axis) {
            return self.mesh().coordinate_at(self.index(), to_axis(self.mesh(), axis));
          },
          py::arg("axis"), "Returns the coordinate of this rank along `axis`.")
      .def(
          "group_comm",
          [](MeshComms& self, const py::object& axes) {
            const auto set = to_set(self.mesh(), axes);
            return without_gil([&] { return self.group(set, /*may_split=*/true).comm; });
          },
          py::arg("axes"),
          "Returns the communicator of the ranks that differ from this one along `axes` only, or "
          "None if that is only this rank. The first axis of the mesh is major. If it does not "
          "exist yet, the call creates it, which is collective, and raises StateError in a CUDA "
          "graph capture.")
      .def(
          "prepare",
          [](MeshComms& self, const py::args& sets) {
            const auto lists = to_sets(self.mesh(), sets);
            py::gil_scoped_release release;
            self.prepare(lists);
          },
          R"(Creates communicators over `sets` of axes ("dp", "dp,tp", "x:(1)2"). Collective.)")
      .def(
          "plan",
          [](MeshComms& self, const mesh::Layout& from, const mesh::Layout& to,
             const mesh::Shape& shape,
             int64_t element_size) { return *self.plan(from, to, shape, element_size); },
          py::arg("from_layout"), py::arg("to_layout"), py::arg("shape"), py::arg("element_size"),
          "Returns the cheapest Plan by `cost` that reshards a tensor of global shape `shape`, "
          "with elements of `element_size` bytes, from `from_layout` to `to_layout`. Plans are "
          "cached.")
      .def("_add_part", &MeshComms::add_part, py::arg("part"), "Makes close() close `part` first.")
      .def("close", &MeshComms::close, py::call_guard<py::gil_scoped_release>(),
           "Finalizes the communicators that this object created, but not the one it was given. "
           "Collective. The mesh is unusable afterwards.")
      .def("__repr__", [](const MeshComms& self) {
        return concat("<", self.mesh().str(), " '", self.name(), "' rank ", self.rank(), ">");
      });
  module.def("_connect", &connect, py::arg("mesh"), py::arg("comm"), py::arg("name"),
             py::arg("cost"), py::arg("sets"));
}

}  // namespace torch_overlap::python
