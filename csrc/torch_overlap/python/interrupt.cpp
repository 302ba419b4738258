#include "torch_overlap/python/interrupt.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"

namespace torch_overlap::python {
namespace {

namespace py = pybind11;

// The exception that a handler raised, until Python receives it. If C++ code handles the Error as
// another one and continues, the next wait raises it again. Belongs to the main thread, guarded by
// the GIL.
std::unique_ptr<py::error_already_set>& raised() {
  static auto* held = new std::unique_ptr<py::error_already_set>;
  return *held;
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (raised() == nullptr) {
    if (PyErr_CheckSignals() == 0) return;
    raised() = std::make_unique<py::error_already_set>();
  }
  fail(ErrorKind::kInterrupted, "interrupted by a signal");
}

}  // namespace

void watch_signals() { set_interrupt_check(&check_signals); }

void restore_interrupt() {
  if (raised() == nullptr) return PyErr_SetNone(PyExc_KeyboardInterrupt);
  raised()->restore();
  raised().reset();
}

}  // namespace torch_overlap::python
