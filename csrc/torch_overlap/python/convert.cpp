#include "torch_overlap/python/convert.h"

#include <datetime.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <chrono>
#include <limits>
#include <utility>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap::python {

SharedObject share(py::object object) {
  return {object.release().ptr(), [](PyObject* held) {
            const Permit permit;
            if (!permit || !Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(held);
          }};
}

py::object borrow(const SharedObject& object) {
  return py::reinterpret_borrow<py::object>(object.get());
}

py::object deepcopy_as_self(const py::object& self, const py::dict& memo) {
  memo[py::cast(reinterpret_cast<std::uintptr_t>(self.ptr()))] = self;
  return self;
}

std::string type_name(py::handle type) {
  const std::string module = py::str(type.attr("__module__"));
  std::string name = py::str(type.attr("__qualname__"));
  if (module == "builtins") return name;
  return concat(module == "torch_overlap._C" ? "torch_overlap" : module, ".", name);
}

std::string describe(py::handle value) {
  constexpr size_t kMaxLength = 60;
  if (value.is_none()) return "None";
  if (PyType_Check(value.ptr())) return concat("the class ", type_name(value));
  const bool is_plain =
      PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) || PyUnicode_Check(value.ptr());
  std::string type = type_name(py::type::handle_of(value));
  if (!is_plain) return type;
  std::string text = py::repr(value);
  if (text.size() > kMaxLength) text = text.substr(0, kMaxLength) + "...";
  return concat(text, " (", type, ")");
}

bool to_bool(std::string_view op, std::string_view name, py::handle value) {
  if (value.ptr() == Py_True) return true;
  if (value.ptr() == Py_False) return false;
  const std::string type = type_name(py::type::handle_of(value));
  TORCH_OVERLAP_CHECK(type == "numpy.bool" || type == "numpy.bool_", kType, op,
                      ": expected a bool for ", name, ", got ", describe(value));
  return PyObject_IsTrue(value.ptr()) == 1;
}

std::optional<bool> to_bool_or_none(std::string_view op, std::string_view name, py::handle value) {
  if (value.is_none()) return std::nullopt;
  return to_bool(op, name, value);
}

std::optional<std::string> to_string_or_none(std::string_view op, std::string_view name,
                                             py::handle value) {
  if (value.is_none()) return std::nullopt;
  TORCH_OVERLAP_CHECK(py::isinstance<py::str>(value), kType, op, ": expected a string for ", name,
                      ", got ", describe(value));
  return value.cast<std::string>();
}

int to_int(std::string_view op, std::string_view name, int64_t value) {
  using Limits = std::numeric_limits<int>;
  TORCH_OVERLAP_CHECK(value >= Limits::min() && value <= Limits::max(), kValue, op,
                      ": expected a number of 32 bits for ", name, ", got ", value);
  return static_cast<int>(value);
}

std::optional<Milliseconds> to_timeout(std::string_view op, py::handle timeout) {
  if (timeout.is_none()) return std::nullopt;
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  TORCH_OVERLAP_CHECK(PyDelta_Check(timeout.ptr()), kType, op,
                      ": expected a datetime.timedelta for timeout, got ", describe(timeout),
                      "; write timedelta(seconds=...)");
  // Whole days come first: a whole timedelta in microseconds may overflow.
  const auto days =
      std::chrono::hours(24) * static_cast<int64_t>(PyDateTime_DELTA_GET_DAYS(timeout.ptr()));
  TORCH_OVERLAP_CHECK(days.count() >= 0, kValue, op, ": expected a timeout >= 0, got ",
                      py::str(timeout).cast<std::string>(), ". Give a longer one.");
  if (days >= kMaxTimeout) return kMaxTimeout;
  const std::chrono::microseconds rest =
      std::chrono::seconds(PyDateTime_DELTA_GET_SECONDS(timeout.ptr())) +
      std::chrono::microseconds(PyDateTime_DELTA_GET_MICROSECONDS(timeout.ptr()));
  return days + std::chrono::ceil<Milliseconds>(rest);
}

py::object from_timeout(Milliseconds timeout) { return py::cast(timeout); }

Hints to_hints(std::string_view op, py::handle hints, std::string_view name) {
  Hints out;
  if (hints.is_none()) return out;
  const auto items = PyMapping_Check(hints.ptr()) && py::hasattr(hints, "items")
                         ? py::reinterpret_steal<py::object>(PyMapping_Items(hints.ptr()))
                         : py::object();
  TORCH_OVERLAP_CHECK(items, kType, op, ": expected a dict of strings for ", name, ", got ",
                      describe(hints));
  for (const py::handle item : items) {
    const py::object key = item[py::int_(0)];
    const py::object value = item[py::int_(1)];
    TORCH_OVERLAP_CHECK(py::isinstance<py::str>(key) && py::isinstance<py::str>(value), kType, op,
                        ": expected a dict of strings for ", name, ", got ", describe(key), ": ",
                        describe(value), "; write numbers and booleans as strings");
    out.emplace(key.cast<std::string>(), value.cast<std::string>());
  }
  return out;
}

py::object from_hints(const Hints& hints) {
  return py::module_::import("types").attr("MappingProxyType")(py::cast(hints));
}

const ReduceOp& to_reduce_op(std::string_view name, py::handle op) {
  try {
    return op.cast<const ReduceOp&>();
  } catch (const py::cast_error&) {
    TORCH_OVERLAP_CHECK(!PyCallable_Check(op.ptr()) || PyType_Check(op.ptr()), kType, name,
                        ": expected a ReduceOp for op, got the function ReduceOp.PREMUL_SUM; write "
                        "ReduceOp.PREMUL_SUM(factor) with a number or a one-element tensor");
    fail(ErrorKind::kType, name, ": expected a ReduceOp for op, got ", describe(op),
         "; write torch_overlap.ReduceOp.SUM, for example");
  }
}

void Warnings::emit_all() {
  const auto warnings = std::exchange(warnings_, {});
  for (const c10::Warning& warning : warnings) {
    if (PyErr_WarnEx(PyExc_UserWarning, warning.msg().c_str(), 1) < 0)
      throw py::error_already_set();
  }
}

void Warnings::forward() noexcept {
  try {
    for (const c10::Warning& warning : warnings_) c10::warn(warning);
  } catch (const std::exception&) {  // out of memory: the exception of the call is what counts
  }
}

void fail_options_type(std::string_view op, py::handle expected, py::handle got) {
  fail(ErrorKind::kType, op, ": expected ", type_name(expected), " for options, got ",
       describe(got));
}

py::object from_exception(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& python) {
    return python.value();
  } catch (const Error& ours) {
    return error_class_of(ours.kind())(ours.what());
  } catch (const std::exception& other) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(other.what());
  }
}

}  // namespace torch_overlap::python
