#include "torch_overlap/python/bind_mesh.h"

#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::python {
namespace {

using mesh::Axis;
using mesh::AxisList;
using mesh::AxisRef;
using mesh::Extent;
using mesh::Layout;
using mesh::Mesh;
using mesh::Partial;
using mesh::ReduceKind;
using mesh::Shape;

std::string type_name(py::handle value) {
  return py::type::of(value).attr("__name__").cast<std::string>();
}

Mesh make_mesh(const py::dict& axes, const std::optional<std::vector<int64_t>>& ranks,
               int64_t ranks_per_host, const std::map<std::string, std::string>& links) {
  std::vector<Axis> list;
  for (const auto& [name, size] : axes) {
    Axis axis{name.cast<std::string>(), size.cast<int64_t>(), ""};
    if (const auto found = links.find(axis.name); found != links.end()) axis.link = found->second;
    list.push_back(std::move(axis));
  }
  for (const auto& [name, link] : links) {
    TORCH_OVERLAP_CHECK(axes.contains(name.c_str()), kValue,
                        "Mesh: expected links of its own axes, got one of '", name, "'");
  }
  TORCH_OVERLAP_CHECK(!ranks || !ranks->empty(), kValue,
                      "Mesh: expected ranks, or None for 0, 1, 2 ..., got an empty list");
  return Mesh(std::move(list), ranks.value_or(std::vector<int64_t>()), ranks_per_host);
}

// Returns the pickled state of a mesh: the given links, not those derived from ranks_per_host.
py::tuple mesh_state(const Mesh& mesh) {
  py::list axes;
  for (const Axis& axis : mesh.axes()) axes.append(py::make_tuple(axis.name, axis.size, axis.link));
  return py::make_tuple(axes, mesh.ranks(), mesh.ranks_per_host());
}

Mesh mesh_of_state(const py::tuple& state) {
  const auto [axes, ranks, ranks_per_host] =
      state.cast<std::tuple<std::vector<std::tuple<std::string, int64_t, std::string>>,
                            std::vector<int64_t>, int64_t>>();
  std::vector<Axis> list;
  for (const auto& [name, size, link] : axes) list.push_back({name, size, link});
  return Mesh(std::move(list), ranks, ranks_per_host);
}

py::dict sizes(const Mesh& mesh) {
  py::dict out;
  for (const Axis& axis : mesh.axes()) out[axis.name.c_str()] = axis.size;
  return out;
}

Layout make_layout(const Mesh& mesh, const py::sequence& dims, const py::object& partial,
                   const py::object& invariant) {
  std::vector<AxisList> lists;
  for (const py::handle dim : dims) lists.push_back(to_axes(mesh, dim));
  return Layout(mesh, std::move(lists), to_partial(mesh, partial), to_axes(mesh, invariant));
}

py::tuple dims_of(const Layout& layout) {
  py::tuple out(layout.num_dims());
  for (size_t d = 0; d < layout.num_dims(); ++d)
    out[d] = axis_names(layout.mesh(), layout.dims()[d]);
  return out;
}

py::dict partial_of(const Layout& layout) {
  py::dict out;
  for (const Partial& p : layout.partial()) {
    out[layout.mesh().name(p.axis).c_str()] = std::string(to_string(p.kind));
  }
  return out;
}

py::tuple offsets(const Layout& layout, const Shape& shape, int64_t rank) {
  const std::vector<Extent> extents = mesh::extents(layout, shape, rank);
  py::tuple out(extents.size());
  for (size_t d = 0; d < extents.size(); ++d) out[d] = extents[d].offset;
  return out;
}

}  // namespace

py::tuple axis_names(const Mesh& mesh, const AxisList& axes) {
  py::tuple out(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) out[i] = mesh.name(axes[i]);
  return out;
}

AxisRef to_axis(const Mesh& mesh, py::handle value) {
  if (py::isinstance<py::str>(value)) return mesh.axis(value.cast<std::string>());
  TORCH_OVERLAP_CHECK(py::isinstance<AxisRef>(value), kType,
                      "Layout: expected the name of an axis, got ", type_name(value));
  const auto ref = value.cast<AxisRef>();
  mesh.check(ref);
  return ref;
}

AxisList to_axes(const Mesh& mesh, py::handle value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::str>(value) || py::isinstance<AxisRef>(value)) {
    return {to_axis(mesh, value)};
  }
  // The order of axes is part of a layout, and the iteration order of a set may differ between
  // processes.
  const bool is_ordered = py::isinstance<py::iterable>(value) &&
                          !py::isinstance<py::anyset>(value) && !py::isinstance<py::dict>(value);
  TORCH_OVERLAP_CHECK(is_ordered, kType, "Layout: expected None, an axis or axes in order, got ",
                      type_name(value));
  AxisList out;
  for (const py::handle item : py::reinterpret_borrow<py::iterable>(value)) {
    out.push_back(to_axis(mesh, item));
  }
  return out;
}

std::vector<Partial> to_partial(const Mesh& mesh, py::handle value) {
  std::vector<Partial> out;
  if (py::isinstance<py::dict>(value)) {
    for (const auto& [axis, kind] : py::reinterpret_borrow<py::dict>(value)) {
      TORCH_OVERLAP_CHECK(py::isinstance<py::str>(kind), kType,
                          "Layout: expected the name of a reduction, got ", type_name(kind));
      out.push_back({to_axis(mesh, axis), mesh::parse_reduce_kind(kind.cast<std::string>())});
    }
    return out;
  }
  for (const AxisRef& axis : to_axes(mesh, value)) out.push_back({axis, ReduceKind::kSum});
  return out;
}

void register_mesh_values(py::module_& module) {
  py::class_<AxisRef>(module, "AxisRef",
                      "A whole axis of a mesh, or a part of one, printed as `axis:(pre)size`.")
      .def_readonly("axis", &AxisRef::axis, "Index of the axis in the mesh.")
      .def_readonly(
          "pre", &AxisRef::pre,
          "Product of the sizes of the parts of the axis that precede this one; 1 if none does.")
      .def_readonly("size", &AxisRef::size, "Number of coordinates of this part.")
      .def(py::self == py::self)
      .def("__hash__",
           [](const AxisRef& ref) { return py::hash(py::make_tuple(ref.axis, ref.pre, ref.size)); })
      .def(py::pickle(
          [](const AxisRef& ref) { return py::make_tuple(ref.axis, ref.pre, ref.size); },
          [](const py::tuple& state) {
            const auto [axis, pre, size] = state.cast<std::tuple<int32_t, int32_t, int32_t>>();
            return AxisRef{axis, pre, size};
          }));

  py::class_<Mesh>(module, "Mesh",
                   R"(Named axes over the ranks of a job. Immutable, hashable.

An index is a position in the mesh, row-major (the first axis is major). ranks[index] is the rank of
the job at that position.

Args:
    axes: dict of axis sizes by name, in order.
    ranks: rank at each index. Default: 0, 1, 2, ...
    ranks_per_host: number of consecutive ranks on each host; 0 means that all ranks share one.
    links: link class ("nvlink", "network") by axis name. Default: nvlink within a host, network
        between hosts.

Raises:
    InvalidValueError: an invalid name, size or rank, or a link of an axis that does not exist.)")
      .def(py::init(&make_mesh), py::arg("axes"), py::arg("ranks") = py::none(),
           py::arg("ranks_per_host") = 0, py::arg("links") = std::map<std::string, std::string>(),
           "Creates a mesh of `axes` (sizes by name) over `ranks`. The class documents the "
           "arguments, also `ranks_per_host` and `links`.")
      .def_static("parse", &Mesh::parse, py::arg("text"), py::arg("ranks_per_host") = 0,
                  "Returns the mesh of a `text` such as \"dp=2,tp=4\": sizes by name. "
                  "`ranks_per_host` is as in the constructor.")
      .def_property_readonly("axes", &sizes, "Dict of axis sizes by name.")
      .def_property_readonly("size", &Mesh::size, "Number of ranks.")
      .def_property_readonly("ranks", &Mesh::ranks, "List of the rank at each index.")
      .def_property_readonly("ranks_per_host", &Mesh::ranks_per_host,
                             "Number of ranks per host; 0 if all ranks share one.")
      .def("axis", &Mesh::axis, py::arg("name"),
           "Returns the AxisRef of a `name`: an axis, \"x\", or a part of one, \"x:(pre)size\". "
           "Raises InvalidValueError, with the valid names, if it does not exist.")
      .def(
          "coordinate",
          [](const Mesh& self, int64_t rank, const py::object& axis) {
            return self.coordinate(rank, to_axis(self, axis));
          },
          py::arg("rank"), py::arg("axis"),
          "Returns the coordinate of `rank` along `axis`. Raises InvalidValueError if the mesh "
          "does not contain them.")
      .def(
          "group",
          [](const Mesh& self, int64_t rank, const py::object& axes) {
            return self.group(rank, to_axes(self, axes));
          },
          py::arg("rank"), py::arg("axes"),
          "Returns the ranks that differ from `rank` along `axes` only, in the order of `axes` "
          "with the first one major: the group of a collective over them.")
      .def(
          "links",
          [](const Mesh& self, const py::object& axes) {
            py::dict out;
            for (const auto& level : self.links(to_axes(self, axes))) {
              out[level.link.c_str()] = level.size;
            }
            return out;
          },
          py::arg("axes"),
          "Returns a dict of the number of ranks that each link class joins in one group over "
          "`axes`. Link classes that join only one rank are omitted.")
      .def(py::self == py::self)
      .def("__hash__", &Mesh::hash)
      .def(py::pickle(&mesh_state, &mesh_of_state))
      .def("__repr__", &Mesh::str);

  py::class_<Layout>(
      module, "Layout",
      R"(The placement of a tensor on a mesh. Independent of the shape. Immutable, hashable.

Along each axis of the mesh a tensor is
- sharded: each rank has its part of one dimension;
- partial: the reduction of the ranks' values is the tensor;
- invariant: every rank has the same value, and the same gradient;
- replicated otherwise: every rank has the same value, and its gradient is partial.

Several axes of one dimension split it one after the other, the first one first, each time like
torch.chunk.

Args:
    mesh: the Mesh.
    dims: for each dimension None, an axis, or a sequence of axes from major to minor. An axis is a
        name or an AxisRef.
    partial: axes along which the tensor is a partial sum, or a dict of the reduction (sum, avg,
        max, min, product) by axis.
    invariant: axes along which the tensor is invariant.

Raises:
    InvalidValueError: an axis that the mesh does not have, or that occurs twice; reductions that do
        not commute.
    InvalidTypeError: a value that is not an axis, or axes in a set or dict, which have no order.)")
      .def(py::init(&make_layout), py::arg("mesh"), py::arg("dims"),
           py::arg("partial") = py::none(), py::arg("invariant") = py::none(),
           "Creates a layout on `mesh`. The class documents the arguments `dims`, `partial` and "
           "`invariant`.")
      .def_static("parse", &Layout::parse, py::arg("mesh"), py::arg("text"),
                  "Returns the layout on `mesh` of a `text` in the format of str(): \"[dp],[tp] "
                  "P{x:max} I{y}\", or \"scalar\" for no dimensions.")
      .def_static("replicated", &Layout::replicated, py::arg("mesh"), py::arg("dims"),
                  "Returns the layout in which every rank of `mesh` has the whole tensor, of "
                  "`dims` dimensions.")
      .def_property_readonly("mesh", &Layout::mesh, "The mesh.")
      .def_property_readonly(
          "dims", &dims_of,
          "Tuple of the names of the axes that shard each dimension, major to minor.")
      .def_property_readonly("partial", &partial_of, "Dict of the reduction by partial axis.")
      .def_property_readonly(
          "invariant", [](const Layout& self) { return axis_names(self.mesh(), self.invariant()); },
          "Names of the invariant axes.")
      .def_property_readonly("num_dims", &Layout::num_dims, "Number of dimensions.")
      .def(
          "local_shape",
          [](const Layout& self, const Shape& shape, int64_t rank) {
            return py::tuple(py::cast(mesh::local_shape(self, shape, rank)));
          },
          py::arg("shape"), py::arg("rank"),
          "Returns the shape that `rank` has of a tensor of global shape `shape`.")
      .def("offsets", &offsets, py::arg("shape"), py::arg("rank"),
           "Returns, per dimension, the offset of the part that `rank` has of a tensor of global "
           "shape `shape`.")
      .def(
          "global_shape",
          [](const Layout& self, const std::vector<Shape>& locals) {
            return py::tuple(py::cast(mesh::global_shape(self, locals)));
          },
          py::arg("local_shapes"),
          "Returns the global shape that has these `local_shapes`, one per mesh index. Raises "
          "InvalidValueError if no global shape has them.")
      .def(
          "with_dims",
          [](const Layout& self, const py::sequence& dims) {
            std::vector<AxisList> lists;
            for (const py::handle dim : dims) lists.push_back(to_axes(self.mesh(), dim));
            return self.with_dims(std::move(lists));
          },
          py::arg("dims"),
          "Returns the layout with `dims` (as in the constructor) in place of its own.")
      .def(
          "with_partial",
          [](const Layout& self, const py::object& partial) {
            return self.with_partial(to_partial(self.mesh(), partial));
          },
          py::arg("partial"),
          "Returns the layout with `partial` (as in the constructor) in place of its own.")
      .def(
          "with_invariant",
          [](const Layout& self, const py::object& axes) {
            return self.with_invariant(to_axes(self.mesh(), axes));
          },
          py::arg("axes"), "Returns the layout with the invariant `axes` in place of its own.")
      .def(py::self == py::self)
      .def("__hash__", &Layout::hash)
      .def(py::pickle([](const Layout& self) { return py::make_tuple(self.mesh(), self.str()); },
                      [](const py::tuple& state) {
                        const auto [mesh, text] = state.cast<std::tuple<Mesh, std::string>>();
                        return Layout::parse(mesh, text);
                      }))
      .def("__str__", &Layout::str)
      .def("__repr__", [](const Layout& self) { return "Layout(" + self.str() + ")"; });
}

void register_mesh(py::module_& module) {
  auto own = module.def_submodule("_mesh", "The planner; torch_overlap.mesh documents it.");
  register_mesh_values(own);
  register_mesh_costs(own);
  register_mesh_plans(own);
  register_mesh_rules(own);
  register_mesh_graphs(own);
}

}  // namespace torch_overlap::python
