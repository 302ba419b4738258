#include "torch_overlap/comm/process_abort.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/python/bindings.h"

namespace torch_overlap::python {
namespace {

namespace py = pybind11;

void write_stacks() {
  const Permit permit;
  if (!permit || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  try {
    constexpr int kStderr = 2;
    py::module_::import("faulthandler").attr("dump_traceback")(kStderr);
    // The process is about to end: no caller can handle the error.
  } catch (const py::error_already_set&) {
  }
}

}  // namespace

void install_stack_writer() { set_stack_writer(&write_stacks); }

}  // namespace torch_overlap::python
