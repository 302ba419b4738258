#include <torch/csrc/Exceptions.h>

#include <array>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/python/interrupt.h"

namespace torch_overlap::python {
namespace {

struct ErrorClass {
  ErrorKind kind;
  const char* name;
  PyObject** builtin;  // its second base, so that `except ValueError` catches it as well
  const char* doc;
};

const std::array<ErrorClass, 5> kClasses{{
    {ErrorKind::kValue, "InvalidValueError", &PyExc_ValueError,
     "A wrong value: a shape, size, rank or name. Nothing was sent; the communicator stays "
     "usable."},
    {ErrorKind::kType, "InvalidTypeError", &PyExc_TypeError,
     "A wrong type: dtype, device or argument. Nothing was sent; the communicator stays usable."},
    {ErrorKind::kTimeout, "OperationTimeoutError", &PyExc_TimeoutError,
     "Another rank did not come in time."},
    {ErrorKind::kUnsupported, "UnsupportedError", &PyExc_NotImplementedError,
     "This backend, dtype or library version cannot do it."},
    {ErrorKind::kState, "StateError", nullptr, "The communicator was finalized or aborted."},
}};

// By kind; kRuntime is Error itself. Owned by the module, which is never unloaded.
std::array<PyObject*, 7> classes{};

PyObject* make_class(py::module_& module, const char* name, py::handle bases, const char* doc) {
  const std::string qualified = std::string("torch_overlap.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  module.add_object(name, made);
  return made;
}

// An Error as torch's exceptions are: torch asks it for its class wherever it comes to Python.
struct TorchError final : torch::PyTorchError {
  explicit TorchError(const Error& error) : torch::PyTorchError(error.what()), kind(error.kind()) {}
  PyObject* python_type() override { return class_of(kind).ptr(); }

  ErrorKind kind;
};

[[noreturn]] void throw_counterpart(const Error& error) {
  if (error.kind() != ErrorKind::kInterrupted) throw TorchError(error);
  const py::gil_scoped_acquire gil;
  restore_interrupt();
  python_error raised;
  raised.persist();
  throw raised;
}

}  // namespace

py::handle class_of(ErrorKind kind) { return classes.at(static_cast<size_t>(kind)); }

void register_errors(py::module_& module) {
  PyObject* base =
      make_class(module, "Error", PyExc_RuntimeError,
                 "What torch_overlap raises, itself when a library or another rank failed.");
  classes.fill(base);
  for (const ErrorClass& entry : kClasses) {
    py::tuple bases = py::make_tuple(py::handle(base));
    if (entry.builtin != nullptr) {
      bases = py::make_tuple(py::handle(base), py::handle(*entry.builtin));
    }
    classes.at(static_cast<size_t>(entry.kind)) = make_class(module, entry.name, bases, entry.doc);
  }
  classes.at(static_cast<size_t>(ErrorKind::kInterrupted)) = PyExc_KeyboardInterrupt;
  set_throw_counterpart(&throw_counterpart);
  watch_signals();
  // Errors of bindings come as they are, those of operators as TorchError, wherever torch leaves
  // them to pybind: so in pybind's shared state.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& ours) {
      if (ours.kind() == ErrorKind::kInterrupted) return restore_interrupt();
      PyErr_SetString(class_of(ours.kind()).ptr(), ours.what());
    } catch (TorchError& ours) {
      PyErr_SetString(ours.python_type(), ours.what());
    }
  });
}

}  // namespace torch_overlap::python
