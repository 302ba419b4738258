#include <pybind11/stl.h>

#include <utility>

#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/python/bind_mesh.h"

namespace torch_overlap::python {
namespace {

using mesh::CostModel;
using mesh::Curve;
using mesh::LinkLevel;
using mesh::LinkModel;
using mesh::OverlapModel;

std::vector<LinkLevel> parse_link_levels(const std::map<std::string, int64_t>& links) {
  std::vector<LinkLevel> levels;
  for (const auto& [link, size] : links) {
    if (size > 1) levels.push_back({link, size});
  }
  return levels;
}

// Units of a dict of a model: those of the JSON files, for readability, or seconds, bytes and
// operations, in which no number is rounded.
struct Units {
  double per_second;
  double seconds;
  double giga;
  double tera;
};
constexpr Units kReadable{.per_second = 1e6, .seconds = 1e-6, .giga = 1e9, .tera = 1e12};
constexpr Units kExact{.per_second = 1, .seconds = 1, .giga = 1, .tera = 1};

py::dict to_dict(const CostModel& model, const Units& units) {
  py::dict links;
  for (const auto& [name, link] : model.links) {
    py::list curves;
    for (const Curve& curve : link.curves) {
      py::list points;
      for (const auto& point : curve.points) {
        points.append(py::make_tuple(point.bytes, point.seconds * units.per_second));
      }
      py::dict one;
      one["collective"] = std::string(to_string(curve.collective));
      one["ranks"] = curve.ranks;
      one["bytes_us"] = points;
      curves.append(one);
    }
    py::dict one;
    one["start_us"] = link.start * units.per_second;
    one["latency_us"] = link.latency * units.per_second;
    one["bandwidth_gbps"] = link.bandwidth / units.giga;
    one["curves"] = curves;
    links[name.c_str()] = one;
  }
  py::dict tflops;
  for (const auto& [size, flops] : model.device.flops) {
    tflops[std::to_string(size).c_str()] = flops / units.tera;
  }
  py::dict device;
  device["tflops"] = tflops;
  device["flops_hot"] = model.device.flops_hot;
  device["memory_gbps"] = model.device.memory / units.giga;
  device["processors"] = model.device.processors;
  device["kernel_us"] = model.device.kernel * units.per_second;
  device["tiles"] = model.device.tiles;
  py::dict overlap;
  overlap["contention"] = model.overlap.contention;
  overlap["start_us"] = model.overlap.start * units.per_second;
  overlap["step_us"] = model.overlap.step * units.per_second;
  py::dict out;
  out["name"] = model.name;
  out["links"] = links;
  out["device"] = device;
  out["overlap"] = overlap;
  return out;
}

LinkModel to_link(const py::dict& from, const Units& units) {
  LinkModel link{.start = from["start_us"].cast<double>() * units.seconds,
                 .latency = from["latency_us"].cast<double>() * units.seconds,
                 .bandwidth = from["bandwidth_gbps"].cast<double>() * units.giga};
  for (const py::handle item : from["curves"]) {
    Curve curve{mesh::parse_collective(item["collective"].cast<std::string>()),
                item["ranks"].cast<int64_t>(),
                {}};
    for (const py::handle point : item["bytes_us"]) {
      const auto [bytes, us] = point.cast<std::pair<double, double>>();
      curve.points.push_back({bytes, us * units.seconds});
    }
    link.curves.push_back(std::move(curve));
  }
  return link;
}

CostModel from_dict(const py::dict& from, const Units& units) {
  CostModel model;
  model.name = from["name"].cast<std::string>();
  for (const auto& [name, link] : from["links"].cast<py::dict>()) {
    model.links[name.cast<std::string>()] = to_link(link.cast<py::dict>(), units);
  }
  const auto device = from["device"].cast<py::dict>();
  for (const auto& [size, tflops] : device["tflops"].cast<py::dict>()) {
    model.device.flops[std::stoll(size.cast<std::string>())] = tflops.cast<double>() * units.tera;
  }
  model.device.flops_hot = device["flops_hot"].cast<double>();
  model.device.memory = device["memory_gbps"].cast<double>() * units.giga;
  model.device.processors = device["processors"].cast<int64_t>();
  model.device.kernel = device["kernel_us"].cast<double>() * units.seconds;
  model.device.tiles = device["tiles"].cast<bool>();
  const auto overlap = from["overlap"].cast<py::dict>();
  model.overlap = OverlapModel{.contention = overlap["contention"].cast<double>(),
                               .start = overlap["start_us"].cast<double>() * units.seconds,
                               .step = overlap["step_us"].cast<double>() * units.seconds};
  model.check();
  return model;
}

}  // namespace

void register_mesh_costs(py::module_& module) {
  py::class_<CostModel>(
      module, "CostModel",
      R"(The cost, in seconds, of collectives, matrix products and copies. Immutable.

h200() is a measured model; bandwidth_only() counts wire bytes only.)")
      .def_static("h200", &CostModel::h200,
                  "Returns a model that was measured on H200s with NVLink. The network between "
                  "hosts is assumed, not measured.")
      .def_static("bandwidth_only", &CostModel::bandwidth_only, py::arg("bandwidth") = 1.0,
                  "Returns a model in which a collective costs its wire bytes / `bandwidth` (bytes "
                  "per second), and nothing else has a cost.")
      .def_static(
          "from_dict", [](const py::dict& values) { return from_dict(values, kReadable); },
          py::arg("values"), "Returns the model with these `values`, in the format of to_dict().")
      .def(
          "to_dict", [](const CostModel& self) { return to_dict(self, kReadable); },
          "Returns a dict of plain numbers (microseconds, GB/s, Tflop/s) that json can write.")
      .def_readonly("name", &CostModel::name, "Name of the model.")
      .def(
          "collective",
          [](const CostModel& self, const std::string& what,
             const std::map<std::string, int64_t>& links, double bytes) {
            return self.collective(mesh::parse_collective(what), parse_link_levels(links), bytes);
          },
          py::arg("collective"), py::arg("links"), py::arg("bytes"),
          "Returns the seconds of one `collective` over a group with these `links` (Mesh.links()). "
          "`bytes` is the larger of a rank's input and output. The collectives are all_reduce, "
          "all_gather, reduce_scatter, all_to_all, permute and broadcast.")
      .def(
          "matmul", &CostModel::matmul, py::arg("m"), py::arg("n"), py::arg("k"),
          py::arg("element_size"),
          "Returns the seconds of the product [m, k] x [k, n] of elements of `element_size` bytes.")
      .def("elementwise", &CostModel::elementwise, py::arg("bytes"),
           "Returns the seconds of a kernel that reads and writes `bytes` of memory, in total, and "
           "does nothing else.")
      .def(
          "overlapped",
          [](const CostModel& self, const std::string& what,
             const std::map<std::string, int64_t>& links, double bytes, double matmul_seconds) {
            return self.overlapped(mesh::parse_collective(what), parse_link_levels(links), bytes,
                                   matmul_seconds);
          },
          py::arg("collective"), py::arg("links"), py::arg("bytes"), py::arg("matmul_seconds"),
          "Returns the seconds of a product of `matmul_seconds` overlapped with the `collective` "
          "that gathers its operand (all_gather) or reduces its result (reduce_scatter, "
          "all_reduce). `links` and `bytes` are as in collective(). Other collectives do not "
          "overlap.")
      .def(py::pickle([](const CostModel& self) { return to_dict(self, kExact); },
                      [](const py::dict& state) { return from_dict(state, kExact); }))
      .def("__repr__", [](const CostModel& self) { return "CostModel('" + self.name + "')"; });
  module.def(
      "wire_bytes",
      [](const std::string& what, int64_t ranks, double bytes) {
        return mesh::wire_bytes(mesh::parse_collective(what), ranks, bytes);
      },
      py::arg("collective"), py::arg("ranks"), py::arg("bytes"),
      "Returns the bytes that one of `ranks` sends for a `collective` on `bytes`, the larger of "
      "its input and output.");
}

}  // namespace torch_overlap::python
