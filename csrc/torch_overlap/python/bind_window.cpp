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

// One of two names of an argument: ours, and the one that torchcomms gives it.
int64_t either(std::string_view op, const char* name, const std::optional<int64_t>& value,
               const char* other_name, const std::optional<int64_t>& other) {
  TORCH_OVERLAP_CHECK(value.has_value() != other.has_value(), kType, op, ": expected ", name,
                      " (also called ", other_name, ") once, got ", value ? "it twice" : "none");
  return value ? *value : *other;
}

int to_rank(std::string_view op, int64_t rank) {
  TORCH_OVERLAP_CHECK(rank >= 0 && rank <= std::numeric_limits<int>::max(), kValue, op,
                      ": expected a rank >= 0, got ", rank);
  return static_cast<int>(rank);
}

template <typename Operation>
WorkPtr run_on_window(std::string_view op, H hints, H timeout, const Operation& operation) {
  static const OpOptions kNone;
  if (hints.is_none() && timeout.is_none()) {
    const py::gil_scoped_release no_gil;
    return operation(kNone);
  }
  OpOptions options;
  if (!hints.is_none()) options.hints = to_hints(op, hints);
  if (const auto value = to_timeout(op, timeout)) options.timeout = *value;
  return without_gil([&] { return operation(options); });
}

WorkPtr put(TorchCommWindow& self, const Tensor& tensor, std::optional<int64_t> dst_rank,
            std::optional<int64_t> offset, bool async_op, H hints, H timeout,
            std::optional<int64_t> peer_rank, std::optional<int64_t> target_offset_nelems,
            bool with_signal) {
  const int dst = to_rank("put", either("put", "dst_rank", dst_rank, "peer_rank", peer_rank));
  const int64_t at = either("put", "offset", offset, "target_offset_nelems", target_offset_nelems);
  return run_on_window("put", hints, timeout, [&](const OpOptions& o) {
    return self.put(tensor, dst, at, async_op, PutOptions{o, with_signal});
  });
}

WorkPtr signal(TorchCommWindow& self, std::optional<int64_t> dst_rank, bool async_op, H hints,
               H timeout, std::optional<int64_t> peer_rank) {
  const int dst = to_rank("signal", either("signal", "dst_rank", dst_rank, "peer_rank", peer_rank));
  return run_on_window("signal", hints, timeout,
                       [&](const OpOptions& o) { return self.signal(dst, async_op, o); });
}

WorkPtr wait_signal(TorchCommWindow& self, int64_t peer_rank, bool async_op, H hints, H timeout) {
  const int peer = to_rank("wait_signal", peer_rank);
  return run_on_window("wait_signal", hints, timeout,
                       [&](const OpOptions& o) { return self.wait_signal(peer, async_op, o); });
}

std::string repr(const TorchCommWindow& window) {
  if (!window.has_tensor()) {
    return concat("<torch_overlap.TorchCommWindow '", window.name(), "' without a tensor>");
  }
  return concat("<torch_overlap.TorchCommWindow '", window.name(), "' of ",
                list_string(window.sizes()), " ", window.dtype(), " on ", window.device(), ">");
}

constexpr const char* kWindowDoc =
    R"(A tensor on every rank that the others write to without its help. TorchComm.new_window() makes it.

    window.put(x, dst_rank=1, offset=0, async_op=False)         # rank 0
    window.signal(1, async_op=False)

    window.wait_signal(0, async_op=False)                       # rank 1: x is in window.get_tensor()

Puts and signals to one rank take effect in the order of issue, so what was put before a signal is there after the wait
that consumes the signal. put signals only with signal=True. A signal belongs to its window and its pair of ranks, is counted,
and is consumed by one wait. A rank that still reads what the next put overwrites is not waited for: let it signal back.

A wait holds up nothing that is issued after it with async_op=True. It ends with OperationTimeoutError when no signal
comes in time, which breaks the communicator. In a CUDA graph all three are nodes; replays and eager calls mix.)";

constexpr const char* kPutDoc =
    R"(Copies `tensor` to the elements from `offset` on of the tensor of rank `dst_rank`. Signals it only if `signal`.

tensor: contiguous, of the window's dtype, anywhere on the device. offset: in elements. signal: signal(dst_rank) follows,
and the work that is returned is done when both are. torchcomms' names peer_rank and
target_offset_nelems are taken as well.)";

constexpr const char* kRegisterDoc =
    R"(Makes `tensor` this rank's part of the window. Collective; blocks.

tensor: contiguous, of the same dtype and size on all ranks; from torch_overlap.symmetric_empty, or made under a
torch.cuda.MemPool over get_mem_allocator(). (Ranks that are threads take any CPU tensor.)
owning: the window keeps the tensor; with False the caller does.

An error of one rank is raised on every rank; ranks that cannot reach each other's memory get UnsupportedError, which
names a pair and why, unless the backend writes to it all the same (NCCL 2.29 or newer: docs/windows.md).)";

}  // namespace

void register_window(py::module_& module) {
  py::native_enum<WinAccessType>(module, "TorchCommWinAccessType", "enum.Enum",
                                 "How a rank gets at another's part of a window.")
      .value("WIN_ACCESS_TYPE_UNIFIED", WinAccessType::WIN_ACCESS_TYPE_UNIFIED)
      .value("WIN_ACCESS_TYPE_SEPARATE", WinAccessType::WIN_ACCESS_TYPE_SEPARATE)
      .finalize();

  py::class_<WindowAttr>(module, "TorchCommWindowAttr", "What get_attr() tells of a rank's part.")
      .def_readonly("access_type", &WindowAttr::access_type,
                    "UNIFIED: map_remote_tensor() gives it. SEPARATE: only put() and "
                    "signal() reach it.");

  py::class_<TorchCommWindow, WindowPtr>(module, "TorchCommWindow", kWindowDoc,
                                         py::release_gil_before_calling_cpp_dtor())
      .def("tensor_register", &TorchCommWindow::tensor_register, py::arg("tensor"),
           py::arg("owning") = true, py::call_guard<py::gil_scoped_release>(), kRegisterDoc)
      .def("tensor_deregister", &TorchCommWindow::tensor_deregister,
           py::call_guard<py::gil_scoped_release>(),
           "Collective; blocks. Waits for this window's operations, for the communicator's timeout "
           "at most, then for all ranks: nobody writes to the tensor any more. Graphs must not be "
           "running.")
      .def("put", &put, py::arg("tensor"), py::arg("dst_rank") = py::none(),
           py::arg("offset") = py::none(), py::arg("async_op") = false,
           py::arg("hints") = py::none(), py::arg("timeout") = py::none(), py::kw_only(),
           py::arg("peer_rank") = py::none(), py::arg("target_offset_nelems") = py::none(),
           py::arg("signal") = false, kPutDoc)
      .def("signal", &signal, py::arg("dst_rank") = py::none(), py::arg("async_op") = false,
           py::arg("hints") = py::none(), py::arg("timeout") = py::none(), py::kw_only(),
           py::arg("peer_rank") = py::none(),
           "Adds one to the signals that rank `dst_rank` (also called peer_rank) has of this one.")
      .def("wait_signal", &wait_signal, py::arg("peer_rank"), py::arg("async_op") = false,
           py::arg("hints") = py::none(), py::arg("timeout") = py::none(),
           "Waits for a signal of rank `peer_rank` that no wait has consumed, and consumes it.")
      .def("map_remote_tensor", &TorchCommWindow::map_remote_tensor, py::arg("rank"),
           py::call_guard<py::gil_scoped_release>(),
           "The tensor of `rank`, in this process: it keeps the memory. Only signals order what is "
           "done with it.")
      .def(
          "get_attr",
          [](const TorchCommWindow& self, int rank) { return WindowAttr{self.access_type(rank)}; },
          py::arg("peer_rank"), "How this rank gets at the part of `peer_rank`.")
      .def("get_size", &TorchCommWindow::bytes, "Bytes of one rank's part.")
      .def("get_tensor", &TorchCommWindow::tensor, "This rank's tensor.")
      .def("get_name", &TorchCommWindow::name, "By which operators find it.")
      .def("get_comm", &TorchCommWindow::comm, "The communicator.")
      .def_property_readonly(
          "dtype",
          [](const TorchCommWindow& self) {
            return py::reinterpret_borrow<py::object>(
                reinterpret_cast<PyObject*>(torch::getTHPDtype(self.dtype())));
          },
          "The dtype of every rank's tensor.")
      .def_property_readonly(
          "shape",
          [](const TorchCommWindow& self) {
            return py::module_::import("torch").attr("Size")(self.sizes());
          },
          "The shape of this rank's tensor.")
      .def_property_readonly("device", &TorchCommWindow::device,
                             "The device of this rank's tensor.")
      .def("__copy__", [](const py::object& self) { return self; })
      .def("__deepcopy__", &deep_copy_is_itself, py::arg("memo"))
      .def(
          "__eq__", [](const py::handle& self, const py::handle& other) { return self.is(other); },
          py::is_operator())
      .def("__hash__", [](const py::handle& self) { return std::hash<void*>()(self.ptr()); })
      .def("__repr__", &repr);

  py::class_<TorchComm, std::shared_ptr<TorchComm>>(module.attr("TorchComm"))
      .def(
          "new_window",
          [](TorchComm& self, const std::optional<Tensor>& tensor) {
            return without_gil([&] { return self.new_window(tensor.value_or(Tensor())); });
          },
          py::arg("tensor") = py::none(),
          "A window of this communicator, with `tensor` registered if one is given. Collective: "
          "all "
          "ranks pass one, or none.")
      .def(
          "get_mem_allocator",
          [](const TorchComm& self) {
            return py::module_::import("torch_overlap.symmetric")
                .attr("get_mem_allocator")(self.backend_name());
          },
          "torch_overlap.get_mem_allocator of this communicator's backend.")
      .def_property_readonly(
          "mem_allocator", [](const py::object& self) { return self.attr("get_mem_allocator")(); },
          "What get_mem_allocator() returns.")
      .def(
          "tensor_register", &TorchComm::tensor_register, py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>(),
          "Tells NCCL of memory that will be in many operations (ncclCommRegister). Local; without "
          "effect on other backends. Deregister before the memory goes.")
      .def("tensor_deregister", &TorchComm::tensor_deregister, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>(), "Takes back tensor_register.");

  module.def(
      "_symmetric_empty",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, c10::Device device) {
        return symmetric_empty(sizes, dtype, device);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"),
      py::call_guard<py::gil_scoped_release>());
  module.def("get_window", &get_window, py::arg("name"), py::call_guard<py::gil_scoped_release>(),
             "The live window of that name that this rank made.");
  module.def("window_names", &window_names, py::call_guard<py::gil_scoped_release>(),
             "The names of the live windows of this process.");
}

}  // namespace torch_overlap::python
