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
  PyObject** builtin;  // second base class, so that `except ValueError` catches it
  const char* doc;
};

const std::array<ErrorClass, 5> kErrorClasses{{
    {ErrorKind::kValue, "InvalidValueError", &PyExc_ValueError,
     "An argument has an invalid value: a shape, size, rank or name. Nothing was sent; the "
     "communicator stays usable."},
    {ErrorKind::kType, "InvalidTypeError", &PyExc_TypeError,
     "An argument has an invalid type, or a tensor an invalid dtype or device. Nothing was sent; "
     "the communicator stays usable."},
    {ErrorKind::kTimeout, "OperationTimeoutError", &PyExc_TimeoutError,
     "Another rank did not arrive before the timeout."},
    {ErrorKind::kUnsupported, "UnsupportedError", &PyExc_NotImplementedError,
     "The backend, dtype or library version does not support the operation."},
    {ErrorKind::kState, "StateError", nullptr, "The communicator was finalized or aborted."},
}};

// Indexed by kind; kRuntime is Error itself. Owned by the module, which is never unloaded.
std::array<PyObject*, 7> error_classes{};

PyObject* make_error_class(py::module_& module, const char* name, py::handle bases,
                           const char* doc) {
  const std::string qualified = std::string("torch_overlap.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  module.add_object(name, made);
  return made;
}

// An Error as a torch exception: torch asks it for its Python class when it reaches Python.
struct TorchError final : torch::PyTorchError {
  explicit TorchError(const Error& error) : torch::PyTorchError(error.what()), kind(error.kind()) {}
  PyObject* python_type() override { return error_class_of(kind).ptr(); }

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

py::handle error_class_of(ErrorKind kind) { return error_classes.at(static_cast<size_t>(kind)); }

void register_errors(py::module_& module) {
  PyObject* base = make_error_class(module, "Error", PyExc_RuntimeError,
                                    "Base class of the exceptions of torch_overlap. Raised itself "
                                    "if a library or another rank failed.");
  error_classes.fill(base);
  for (const ErrorClass& entry : kErrorClasses) {
    py::tuple bases = py::make_tuple(py::handle(base));
    if (entry.builtin != nullptr) {
      bases = py::make_tuple(py::handle(base), py::handle(*entry.builtin));
    }
    error_classes.at(static_cast<size_t>(entry.kind)) =
        make_error_class(module, entry.name, bases, entry.doc);
  }
  error_classes.at(static_cast<size_t>(ErrorKind::kInterrupted)) = PyExc_KeyboardInterrupt;
  set_exception_translator(&throw_counterpart);
  watch_signals();
  // Bindings throw Error. Operators throw TorchError, which may reach pybind's translators from
  // torch's bindings, so the translator is registered in pybind's shared state.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& ours) {
      if (ours.kind() == ErrorKind::kInterrupted) return restore_interrupt();
      PyErr_SetString(error_class_of(ours.kind()).ptr(), ours.what());
    } catch (TorchError& ours) {
      PyErr_SetString(ours.python_type(), ours.what());
    }
  });
}

}  // namespace torch_overlap::python
