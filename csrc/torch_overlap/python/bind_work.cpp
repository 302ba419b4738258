#include <pybind11/native_enum.h>

#include "torch_overlap/comm/work.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

constexpr const char* kWorkDoc =
    R"(One operation that was issued. It keeps the tensors alive until the operation is done. Any thread may use it.)";

constexpr const char* kWaitDoc = R"(Makes the results visible to what comes next.

CUDA: the current stream waits for the operation; the host does not. CPU: the thread blocks. With a `timeout`
(a timedelta) the thread blocks on every device, for that long at most.

Raises: OperationTimeoutError, or the operation's own error. In a CUDA graph capture it adds the edge from the
operation to the current stream, and is needed only where the captured work reads the result.)";

}  // namespace

void register_work(py::module_& module) {
  py::native_enum<WorkStatus>(module, "WorkStatus", "enum.Enum", "Where an operation is.")
      .value("NOT_STARTED", WorkStatus::NOT_STARTED)
      .value("INPROGRESS", WorkStatus::INPROGRESS)
      .value("COMPLETED", WorkStatus::COMPLETED)
      .value("TIMEDOUT", WorkStatus::TIMEDOUT)
      .value("ERROR", WorkStatus::ERROR)
      .finalize();

  // The last reference may end a communicator, whose threads may want the GIL.
  py::class_<TorchWork, WorkPtr>(module, "TorchWork", kWorkDoc,
                                 py::release_gil_before_calling_cpp_dtor())
      .def(
          "wait",
          [](TorchWork& self, const py::handle& timeout) {
            const auto limit = to_timeout("wait", timeout);
            const py::gil_scoped_release no_gil;
            limit ? self.wait_blocking(limit) : self.wait();
          },
          py::arg("timeout") = py::none(), kWaitDoc)
      .def(
          "wait_blocking",
          [](TorchWork& self, const py::handle& timeout) {
            const auto limit = to_timeout("wait_blocking", timeout);
            const py::gil_scoped_release no_gil;
            self.wait_blocking(limit);
          },
          py::arg("timeout") = py::none(),
          "Blocks the thread, on every device, until the operation is done, for `timeout` at most.")
      .def("is_completed", &TorchWork::is_completed, py::call_guard<py::gil_scoped_release>(),
           "Whether the operation is done, well or badly. Asks the device now; never blocks. False "
           "for an operation "
           "that was captured in a CUDA graph: it runs at each replay.")
      .def_property_readonly("stream", &TorchWork::stream,
                             "The torch.Stream that the operation runs on; None on CPU.")
      .def("status", &TorchWork::status, py::call_guard<py::gil_scoped_release>(),
           "The WorkStatus, now.")
      .def(
          "exception",
          [](TorchWork& self) {
            std::exception_ptr error;
            {
              const py::gil_scoped_release no_gil;
              error = self.exception();
            }
            return from_exception(error);
          },
          "The exception that the operation ended with, or None.")
      .def(
          "_on_completion",
          [](TorchWork& self, py::object callback) {
            auto shared = share(std::move(callback));
            const py::gil_scoped_release no_gil;
            self.on_completion([shared](const std::exception_ptr& error) {
              const py::gil_scoped_acquire gil;
              borrow(shared)(from_exception(error));
            });
          },
          py::arg("callback"));
}

}  // namespace torch_overlap::python
