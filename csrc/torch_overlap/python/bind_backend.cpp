#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/py_backend.h"

namespace torch_overlap::python {
namespace {

void register_py_backend(const std::string& name, py::type type) {
  BackendEntry entry;
  entry.make =
      [shared = share(std::move(type))](const BackendContext& context) -> std::shared_ptr<Backend> {
    const py::gil_scoped_acquire gil;
    return std::make_shared<PyBackend>(shared, context);
  };
  entry.devices = {c10::kCPU, c10::kCUDA};
  register_backend(to_lower(name), std::move(entry));
}

}  // namespace

void register_backends(py::module_& module) {
  module.def("built_backends", &registered_backends,
             "Returns the names of the backends that new_comm accepts now.");
  module.def("_register_backend", &register_py_backend, py::arg("name"), py::arg("backend_class"));
}

}  // namespace torch_overlap::python
