#include "torch_overlap/python/convert.h"

#include <datetime.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <chrono>

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

py::object deep_copy_is_itself(const py::object& self, const py::dict& memo) {
  memo[py::cast(reinterpret_cast<std::uintptr_t>(self.ptr()))] = self;
  return self;
}

std::string describe(py::handle value) {
  return concat(std::string(py::repr(value)), " (", Py_TYPE(value.ptr())->tp_name, ")");
}

std::optional<Milliseconds> to_timeout(std::string_view op, py::handle timeout) {
  if (timeout.is_none()) return std::nullopt;
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  TORCH_OVERLAP_CHECK(PyDelta_Check(timeout.ptr()), kType, op,
                      ": expected timeout as a datetime.timedelta, got ", describe(timeout),
                      "; write timedelta(seconds=...)");
  // Whole days first: all of a timedelta in microseconds need not fit.
  const auto days =
      std::chrono::hours(24) * static_cast<int64_t>(PyDateTime_DELTA_GET_DAYS(timeout.ptr()));
  TORCH_OVERLAP_CHECK(days.count() >= 0, kValue, op, ": expected a timeout >= 0, got ",
                      describe(timeout));
  if (days >= kLongestTimeout) return kLongestTimeout;
  const std::chrono::microseconds rest =
      std::chrono::seconds(PyDateTime_DELTA_GET_SECONDS(timeout.ptr())) +
      std::chrono::microseconds(PyDateTime_DELTA_GET_MICROSECONDS(timeout.ptr()));
  return days + std::chrono::ceil<Milliseconds>(rest);
}

py::object from_timeout(Milliseconds timeout) { return py::cast(timeout); }

Hints to_hints(std::string_view op, py::handle hints) {
  Hints out;
  if (hints.is_none()) return out;
  const auto items = PyMapping_Check(hints.ptr()) && py::hasattr(hints, "items")
                         ? py::reinterpret_steal<py::object>(PyMapping_Items(hints.ptr()))
                         : py::object();
  TORCH_OVERLAP_CHECK(items, kType, op, ": expected hints as a dict of strings, got ",
                      describe(hints));
  for (const py::handle item : items) {
    const py::object key = item[py::int_(0)];
    const py::object value = item[py::int_(1)];
    TORCH_OVERLAP_CHECK(py::isinstance<py::str>(key) && py::isinstance<py::str>(value), kType, op,
                        ": expected hints as a dict of strings, got ", describe(key), ": ",
                        describe(value), "; write numbers and booleans as strings");
    out.emplace(key.cast<std::string>(), value.cast<std::string>());
  }
  return out;
}

py::object from_hints(const Hints& hints) {
  return py::module_::import("types").attr("MappingProxyType")(py::cast(hints));
}

const ReduceOp& to_reduce_op(std::string_view name, py::handle op) {
  py::detail::make_caster<ReduceOp> caster;
  if (__builtin_expect(!op.is_none() && caster.load(op, /*convert=*/false), 1)) {
    return py::detail::cast_op<const ReduceOp&>(caster);
  }
  TORCH_OVERLAP_CHECK(!PyCallable_Check(op.ptr()) || PyType_Check(op.ptr()), kType, name,
                      ": expected a ReduceOp, got the function ReduceOp.PREMUL_SUM; write "
                      "ReduceOp.PREMUL_SUM(factor) with a number or a one-element tensor");
  fail(ErrorKind::kType, name, ": expected a ReduceOp, got ", describe(op),
       "; write torch_overlap.ReduceOp.SUM, for example");
}

void Warnings::emit() {
  for (const std::string& message : messages_) {
    if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) < 0) throw py::error_already_set();
  }
}

void fail_options(std::string_view op, const std::type_info& expected, py::handle got) {
  const auto* info = py::detail::get_type_info(expected);
  fail(ErrorKind::kType, op, ": expected options as ", info ? info->type->tp_name : expected.name(),
       ", got ", describe(got));
}

py::object from_exception(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& python) {
    return python.value();
  } catch (const Error& ours) {
    return class_of(ours.kind())(ours.what());
  } catch (const std::exception& other) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(other.what());
  }
}

}  // namespace torch_overlap::python
