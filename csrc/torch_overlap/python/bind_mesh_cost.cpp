#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/python/bind_mesh.h"

namespace torch_overlap::python {
namespace {

using mesh::Collective;
using mesh::CostModel;
using mesh::Curve;
using mesh::DeviceModel;
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

// Returns the form of the JSON files: numbers in microseconds and GB/s, for readability.
py::dict to_dict(const CostModel& model) {
  py::dict links;
  for (const auto& [name, link] : model.links) {
    py::list curves;
    for (const Curve& curve : link.curves) {
      py::list points;
      for (const auto& point : curve.points) {
        points.append(py::make_tuple(point.bytes, point.seconds * 1e6));
      }
      py::dict one;
      one["collective"] = std::string(to_string(curve.collective));
      one["ranks"] = curve.ranks;
      one["bytes_us"] = points;
      curves.append(one);
    }
    py::dict one;
    one["start_us"] = link.start * 1e6;
    one["latency_us"] = link.latency * 1e6;
    one["bandwidth_gbps"] = link.bandwidth / 1e9;
    one["curves"] = curves;
    links[name.c_str()] = one;
  }
  py::dict tflops;
  for (const auto& [size, flops] : model.device.flops) {
    tflops[std::to_string(size).c_str()] = flops / 1e12;
  }
  py::dict device;
  device["tflops"] = tflops;
  device["flops_hot"] = model.device.flops_hot;
  device["memory_gbps"] = model.device.memory / 1e9;
  device["processors"] = model.device.processors;
  device["kernel_us"] = model.device.kernel * 1e6;
  device["tiles"] = model.device.tiles;
  py::dict overlap;
  overlap["contention"] = model.overlap.contention;
  overlap["start_us"] = model.overlap.start * 1e6;
  overlap["step_us"] = model.overlap.step * 1e6;
  py::dict out;
  out["name"] = model.name;
  out["links"] = links;
  out["device"] = device;
  out["overlap"] = overlap;
  return out;
}

// Returns the pickled state: the exact numbers, which the units of to_dict() would round.
py::tuple cost_state(const CostModel& model) {
  py::dict links;
  for (const auto& [name, link] : model.links) {
    py::list curves;
    for (const Curve& curve : link.curves) {
      py::list points;
      for (const auto& point : curve.points) {
        points.append(py::make_tuple(point.bytes, point.seconds));
      }
      curves.append(py::make_tuple(std::string(to_string(curve.collective)), curve.ranks, points));
    }
    links[name.c_str()] = py::make_tuple(link.start, link.latency, link.bandwidth, curves);
  }
  const DeviceModel& device = model.device;
  const OverlapModel& overlap = model.overlap;
  return py::make_tuple(model.name, links,
                        py::make_tuple(device.flops, device.flops_hot, device.memory,
                                       device.processors, device.kernel, device.tiles),
                        py::make_tuple(overlap.contention, overlap.start, overlap.step));
}

CostModel cost_of_state(const py::tuple& state) {
  using Points = std::vector<std::pair<double, double>>;
  using Curves = std::vector<std::tuple<std::string, int64_t, Points>>;
  using Links = std::map<std::string, std::tuple<double, double, double, Curves>>;
  using Device = std::tuple<std::map<int64_t, double>, double, double, int64_t, double, bool>;
  const auto [name, links, device, overlap] =
      state.cast<std::tuple<std::string, Links, Device, std::tuple<double, double, double>>>();
  CostModel model;
  model.name = name;
  for (const auto& [link_name, values] : links) {
    const auto& [start, latency, bandwidth, curves] = values;
    LinkModel& link = model.links[link_name];
    link = {.start = start, .latency = latency, .bandwidth = bandwidth};
    for (const auto& [collective, ranks, points] : curves) {
      Curve& curve = link.curves.emplace_back(Curve{mesh::parse_collective(collective), ranks, {}});
      for (const auto& [bytes, seconds] : points) curve.points.push_back({bytes, seconds});
    }
  }
  std::tie(model.device.flops, model.device.flops_hot, model.device.memory, model.device.processors,
           model.device.kernel, model.device.tiles) = device;
  std::tie(model.overlap.contention, model.overlap.start, model.overlap.step) = overlap;
  model.check();
  return model;
}

LinkModel to_link(const py::dict& from) {
  LinkModel link{.start = from["start_us"].cast<double>() * 1e-6,
                 .latency = from["latency_us"].cast<double>() * 1e-6,
                 .bandwidth = from["bandwidth_gbps"].cast<double>() * 1e9};
  for (const py::handle item : from["curves"]) {
    Curve curve{mesh::parse_collective(item["collective"].cast<std::string>()),
                item["ranks"].cast<int64_t>(),
                {}};
    for (const py::handle point : item["bytes_us"]) {
      const auto [bytes, us] = point.cast<std::pair<double, double>>();
      curve.points.push_back({bytes, us * 1e-6});
    }
    link.curves.push_back(std::move(curve));
  }
  return link;
}

CostModel from_dict(const py::dict& from) {
  CostModel model;
  model.name = from["name"].cast<std::string>();
  for (const auto& [name, link] : from["links"].cast<py::dict>()) {
    model.links[name.cast<std::string>()] = to_link(link.cast<py::dict>());
  }
  const auto device = from["device"].cast<py::dict>();
  for (const auto& [size, tflops] : device["tflops"].cast<py::dict>()) {
    model.device.flops[std::stoll(size.cast<std::string>())] = tflops.cast<double>() * 1e12;
  }
  model.device.flops_hot = device["flops_hot"].cast<double>();
  model.device.memory = device["memory_gbps"].cast<double>() * 1e9;
  model.device.processors = device["processors"].cast<int64_t>();
  model.device.kernel = device["kernel_us"].cast<double>() * 1e-6;
  model.device.tiles = device["tiles"].cast<bool>();
  const auto overlap = from["overlap"].cast<py::dict>();
  model.overlap = OverlapModel{.contention = overlap["contention"].cast<double>(),
                               .start = overlap["start_us"].cast<double>() * 1e-6,
                               .step = overlap["step_us"].cast<double>() * 1e-6};
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
      .def_static("from_dict", &from_dict, py::arg("values"),
                  "Returns the model with these `values`, in the format of to_dict().")
      .def("to_dict", &to_dict,
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
      .def(py::pickle(&cost_state, &cost_of_state))
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
