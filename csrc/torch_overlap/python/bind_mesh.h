#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "torch_overlap/mesh/layout.h"

// Bindings of the planner. They do not include torch, so they compile in seconds. All of them are
// in the module _C._mesh, which torch_overlap/mesh/_core.pyi describes.
namespace torch_overlap::python {

namespace py = pybind11;

void register_mesh(py::module_& module);         // creates _C._mesh from the following
void register_mesh_values(py::module_& module);  // Mesh, AxisRef, Layout and their shapes
void register_mesh_costs(py::module_& module);   // CostModel
void register_mesh_plans(py::module_& module);   // Step, Plan, plan_reshard, simulate
void register_mesh_rules(py::module_& module);   // OpRule, propagate
void register_mesh_graphs(py::module_& module);  // Graph, auto_shard

// Converts "x", "x:(1)2" or an AxisRef.
mesh::AxisRef to_axis(const mesh::Mesh& mesh, py::handle value);
// Converts None, one axis, or a sequence of axes, major to minor.
mesh::AxisList to_axes(const mesh::Mesh& mesh, py::handle value);
py::tuple axis_names(const mesh::Mesh& mesh, const mesh::AxisList& axes);
// Converts {"x": "sum"}, or axes of partial sums; None is empty.
std::vector<mesh::Partial> to_partial(const mesh::Mesh& mesh, py::handle value);

}  // namespace torch_overlap::python
