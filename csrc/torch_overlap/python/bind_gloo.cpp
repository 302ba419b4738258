#include "torch_overlap/comm/backends/gloo/gloo.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

// factory(store, rank, size, timeout, hostname, interface, lazy) -> c10d Backend; see
// torch_overlap/_gloo.py.
void set_factory(py::function factory) {
  set_gloo_factory([shared = share(std::move(factory))](const GlooRequest& request) {
    const py::gil_scoped_acquire gil;
    return borrow(shared)(request.store, request.rank, request.size, from_timeout(request.timeout),
                          request.hostname, request.interface, request.lazy)
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  });
}

}  // namespace

void register_gloo(py::module_& module) {
  module.def("_set_gloo_factory", &set_factory, py::arg("factory"));
}

}  // namespace torch_overlap::python
