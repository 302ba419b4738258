#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "torch_overlap/mesh/layout.h"

// The planner's bindings: no torch in them, so that they compile in seconds. All are in the module
// _C._mesh, which torch_overlap/mesh/_core.pyi describes.
namespace torch_overlap::python {

namespace py = pybind11;

void register_mesh(py::module_& module);         // makes _C._mesh of all these:
void register_mesh_values(py::module_& module);  // Mesh, AxisRef, Layout and their shapes
void register_mesh_costs(py::module_& module);   // CostModel
void register_mesh_plans(py::module_& module);   // Step, Plan, plan_reshard, simulate
void register_mesh_rules(py::module_& module);   // OpRule, propagate
void register_mesh_graphs(py::module_& module);  // Graph, auto_shard

// "x", "x:(1)2" or an AxisRef.
mesh::AxisRef to_axis(const mesh::Mesh& mesh, py::handle value);
// None, one axis, or a sequence of axes, major to minor.
mesh::AxisList to_axes(const mesh::Mesh& mesh, py::handle value);
py::tuple axis_names(const mesh::Mesh& mesh, const mesh::AxisList& axes);
// {"x": "sum"}, or axes that are pending sums; None is nothing.
std::vector<mesh::Partial> to_partial(const mesh::Mesh& mesh, py::handle value);

}  // namespace torch_overlap::python
