#include "torch_overlap/comm/work.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

constexpr const char* kWorkDoc =
    R"(An issued operation. The memory of its tensors is not reused before it is done. Thread-safe.)";

}  // namespace

void register_work(py::module_& module) {
  bind_enum<WorkStatus>(module, "WorkStatus", "enum.Enum", "State of an operation.", 5);

  // The last reference may destroy a communicator, whose threads may need the GIL.
  py::class_<TorchWork, WorkPtr>(module, "TorchWork", kWorkDoc,
                                 py::release_gil_before_calling_cpp_dtor())
      .def("_wait",
           [](TorchWork& self, const py::handle& timeout) {
             const auto limit = to_timeout("wait", timeout);
             const py::gil_scoped_release no_gil;
             limit ? self.wait_blocking(limit) : self.wait();
           })
      .def("_wait_blocking",
           [](TorchWork& self, const py::handle& timeout) {
             const auto limit = to_timeout("wait_blocking", timeout);
             const py::gil_scoped_release no_gil;
             self.wait_blocking(limit);
           })
      .def("_is_completed", &TorchWork::is_completed, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("stream", &TorchWork::stream,
                             "torch.Stream that the operation runs on; None on CPU.")
      .def("_status", &TorchWork::status, py::call_guard<py::gil_scoped_release>())
      .def("_exception",
           [](TorchWork& self) {
             std::exception_ptr error;
             {
               const py::gil_scoped_release no_gil;
               error = self.exception();
             }
             return from_exception(error);
           })
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
