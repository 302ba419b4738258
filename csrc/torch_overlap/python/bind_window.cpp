#include <pybind11/native_enum.h>

#include "torch_overlap/comm/window.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using at::Tensor;
using WindowPtr = std::shared_ptr<TorchCommWindow>;
using H = const py::handle&;

struct WindowAttr {
  WinAccessType access_type;
};

template <typename Operation>
WorkPtr run_on_window(std::string_view op, H async_op, H hints, H timeout,
                      const Operation& operation) {
  return run_operation<OpOptions>(op, async_op, hints, timeout, py::none(), operation);
}

WorkPtr put(TorchCommWindow& self, const Tensor& tensor, int64_t dst_rank, int64_t offset,
            H async_op, H hints, H timeout, H with_signal) {
  const int dst = to_int("put", "dst_rank", dst_rank);
  const bool signals = to_bool("put", "signal", with_signal);
  return run_on_window("put", async_op, hints, timeout, [&](bool is_async, const OpOptions& o) {
    return self.put(tensor, dst, offset, is_async, PutOptions{o, signals});
  });
}

WorkPtr signal(TorchCommWindow& self, int64_t dst_rank, H async_op, H hints, H timeout) {
  const int dst = to_int("signal", "dst_rank", dst_rank);
  return run_on_window("signal", async_op, hints, timeout, [&](bool is_async, const OpOptions& o) {
    return self.signal(dst, is_async, o);
  });
}

WorkPtr wait_signal(TorchCommWindow& self, int64_t peer_rank, H async_op, H hints, H timeout) {
  const int peer = to_int("wait_signal", "peer_rank", peer_rank);
  return run_on_window(
      "wait_signal", async_op, hints, timeout,
      [&](bool is_async, const OpOptions& o) { return self.wait_signal(peer, is_async, o); });
}

std::string repr(const TorchCommWindow& window) {
  if (!window.has_tensor()) {
    return concat("<torch_overlap.TorchCommWindow '", window.name(), "' without a tensor>");
  }
  return concat("<torch_overlap.TorchCommWindow '", window.name(), "' of ",
                list_string(window.sizes()), " ", window.dtype(), " on ", window.device(), ">");
}

constexpr const char* kWindowDoc =
    R"(A tensor on every rank that the other ranks write without its participation.

TorchComm.new_window() creates it. Example:

    window.put(x, dst_rank=1, offset=0, async_op=False)         # rank 0
    window.signal(1, async_op=False)

    window.wait_signal(0, async_op=False)                       # rank 1: x is in window.get_tensor()

Order: puts and signals to one rank take effect in the order of issue, so data that was put before a
signal is visible after the wait that consumes the signal. put() signals only with signal=True.
Signals belong to their window and pair of ranks, are counted, and each is consumed by one wait.
Nothing keeps a put from overwriting data that the owner still reads: the owner must signal back.

A wait does not block operations that are issued after it with async_op=True. If no signal arrives
before the timeout, it ends with OperationTimeoutError, and the communicator is unusable. In a CUDA
graph, put, signal and wait_signal become nodes; replays and eager calls can be mixed.)";

}  // namespace

void register_window(py::module_& module) {
  py::native_enum<WinAccessType>(module, "TorchCommWinAccessType", "enum.Enum",
                                 "Access of a rank to another rank's part of a window.")
      .value("WIN_ACCESS_TYPE_UNIFIED", WinAccessType::WIN_ACCESS_TYPE_UNIFIED)
      .value("WIN_ACCESS_TYPE_SEPARATE", WinAccessType::WIN_ACCESS_TYPE_SEPARATE)
      .finalize();

  py::class_<WindowAttr>(module, "TorchCommWindowAttr",
                         "Attributes of a rank's part of a window; get_attr() returns them.")
      .def_readonly("access_type", &WindowAttr::access_type,
                    "UNIFIED if map_remote_tensor() can map the part; SEPARATE if only put() and "
                    "signal() can reach it.");

  py::class_<TorchCommWindow, WindowPtr>(module, "TorchCommWindow", kWindowDoc,
                                         py::release_gil_before_calling_cpp_dtor())
      .def("_tensor_register",
           [](TorchCommWindow& self, const Tensor& tensor, H owning) {
             const bool is_owning = to_bool("tensor_register", "owning", owning);
             const py::gil_scoped_release no_gil;
             self.tensor_register(tensor, is_owning);
           })
      .def("_tensor_deregister", &TorchCommWindow::tensor_deregister,
           py::call_guard<py::gil_scoped_release>())
      .def("_put", &put)
      .def("_signal", &signal)
      .def("_wait_signal", &wait_signal)
      .def("_map_remote_tensor",
           [](TorchCommWindow& self, int64_t rank) {
             const int peer = to_int("map_remote_tensor", "rank", rank);
             const py::gil_scoped_release no_gil;
             return self.map_remote_tensor(peer);
           })
      .def("_get_attr",
           [](const TorchCommWindow& self, int64_t peer_rank) {
             return WindowAttr{self.access_type(to_int("get_attr", "peer_rank", peer_rank))};
           })
      .def("_get_size", &TorchCommWindow::bytes)
      .def("_get_tensor", &TorchCommWindow::tensor)
      .def("_get_name", &TorchCommWindow::name)
      .def("_get_comm", &TorchCommWindow::comm)
      .def_property_readonly(
          "dtype",
          [](const TorchCommWindow& self) {
            return py::reinterpret_borrow<py::object>(
                reinterpret_cast<PyObject*>(torch::getTHPDtype(self.dtype())));
          },
          "dtype of every rank's tensor.")
      .def_property_readonly(
          "shape",
          [](const TorchCommWindow& self) {
            return py::module_::import("torch").attr("Size")(self.sizes());
          },
          "Shape of this rank's tensor.")
      .def_property_readonly("device", &TorchCommWindow::device, "Device of this rank's tensor.")
      .def("__copy__", [](const py::object& self) { return self; })
      .def("__deepcopy__", &deepcopy_as_self, py::arg("memo"))
      .def(
          "__eq__", [](const py::handle& self, const py::handle& other) { return self.is(other); },
          py::is_operator())
      .def("__hash__", [](const py::handle& self) { return std::hash<void*>()(self.ptr()); })
      .def("__repr__", &repr);

  py::class_<TorchComm, std::shared_ptr<TorchComm>>(module.attr("TorchComm"))
      .def("_new_window",
           [](TorchComm& self, const std::optional<Tensor>& tensor) {
             return without_gil([&] { return self.new_window(tensor.value_or(Tensor())); });
           })
      .def_property_readonly(
          "mem_allocator", [](const py::object& self) { return self.attr("get_mem_allocator")(); },
          "The allocator that get_mem_allocator() returns.")
      .def("_tensor_register", &TorchComm::tensor_register,
           py::call_guard<py::gil_scoped_release>())
      .def("_tensor_deregister", &TorchComm::tensor_deregister,
           py::call_guard<py::gil_scoped_release>());

  module.def(
      "_symmetric_empty",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, c10::Device device) {
        return symmetric_empty(sizes, dtype, device);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"),
      py::call_guard<py::gil_scoped_release>());
  module.def("_get_window", &get_window, py::call_guard<py::gil_scoped_release>());
  module.def("window_names", &window_names, py::call_guard<py::gil_scoped_release>(),
             "Returns the names of the live windows of this process.");
}

}  // namespace torch_overlap::python
