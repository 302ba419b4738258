#pragma once

#include <c10/util/Exception.h>
#include <pybind11/native_enum.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/comm/work.h"

// Conversions between Python and C++ values. Optional arguments are passed as handles and converted
// only if they are not None, so an operation without them has no overhead.
namespace torch_overlap::python {

namespace py = pybind11;

// A Python object that C++ may release on any thread. After the interpreter has ended it is leaked.
using SharedObject = std::shared_ptr<PyObject>;
SharedObject share(py::object object);
py::object borrow(const SharedObject& object);

// __deepcopy__ of an object that cannot be copied: returns the object itself.
py::object deepcopy_as_self(const py::object& self, const py::dict& memo);

// Returns the name of a type: "numpy.ndarray", "int".
std::string type_name(py::handle type);
// Returns a value as error messages show it: "5 (int)"; only the type if its text may be long or it
// is on a GPU.
std::string describe(py::handle value);

// Converts a bool of Python or NumPy. `name`: the argument's name in errors.
bool to_bool(std::string_view op, std::string_view name, py::handle value);
std::optional<bool> to_bool_or_none(std::string_view op, std::string_view name, py::handle value);
std::optional<std::string> to_string_or_none(std::string_view op, std::string_view name,
                                             py::handle value);
int to_int(std::string_view op, std::string_view name, int64_t value);

// Converts a timedelta, rounded up to milliseconds because 0 would mean the default. None is
// nullopt.
std::optional<Milliseconds> to_timeout(std::string_view op, py::handle timeout);
py::object from_timeout(Milliseconds timeout);

// Converts a dict of strings; None is empty.
Hints to_hints(std::string_view op, py::handle hints, std::string_view name = "hints");
// Returns a read-only view, because a write to a copy would be lost silently.
py::object from_hints(const Hints& hints);

// The returned object belongs to `op`, which the caller's arguments keep alive.
const ReduceOp& to_reduce_op(std::string_view name, py::handle op);

// Returns the Python exception for a C++ one.
py::object from_exception(const std::exception_ptr& error);
// Returns the Python class of an error's kind, as a reference borrowed from the module.
py::handle error_class_of(ErrorKind kind);

// Collects the warnings of a call that runs without the GIL, until they can become Python warnings.
// If the call throws, they go to the handler that was set before: one call raises one exception.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() = default;
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  ~Warnings() override {
    if (!warnings_.empty()) forward();
  }
  void process(const c10::Warning& warning) override { warnings_.push_back(warning); }
  // Requires the GIL. Throws if the user's filter turns warnings into errors.
  void emit() {
    if (!warnings_.empty()) emit_all();
  }

 private:
  void emit_all();
  void forward() noexcept;
  std::vector<c10::Warning> warnings_;
};

// Runs `body` without the GIL. Its warnings become Python warnings.
template <typename Body>
auto without_gil(const Body& body) -> decltype(body()) {
  Warnings warnings;
  auto result = [&] {
    const py::gil_scoped_release no_gil;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    return body();
  }();
  warnings.emit();
  return result;
}

// Binds an enum whose values are 0 .. count-1, under the names of to_string(). `base`: its class in
// Python.
template <typename Enum>
void bind_enum(py::module_& module, const char* name, const char* base, const char* doc,
               size_t count) {
  py::native_enum<Enum> bound(module, name, base, doc);
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    bound.value(std::string(to_string(value)).c_str(), value);
  }
  bound.finalize();
}

// `expected`: the options class.
[[noreturn]] void fail_options_type(std::string_view op, py::handle expected, py::handle got);

// Returns `options` with `hints` and `timeout` overriding its fields.
template <typename Options>
OpOptions to_options(std::string_view op, py::handle hints, py::handle timeout,
                     py::handle options) {
  OpOptions out;
  if (!options.is_none()) {
    if (!py::isinstance<Options>(options)) fail_options_type(op, py::type::of<Options>(), options);
    out = options.cast<const Options&>();
  }
  if (!hints.is_none()) {
    for (auto& [key, value] : to_hints(op, hints)) out.hints.insert_or_assign(key, value);
  }
  if (const auto value = to_timeout(op, timeout)) out.timeout = *value;
  return out;
}

// Runs an operation without the GIL. Options are built only if there are any: most calls have none.
template <typename Options, typename Operation>
WorkPtr run_operation(std::string_view op, py::handle async_op, py::handle hints,
                      py::handle timeout, py::handle options, const Operation& operation) {
  static const OpOptions kNone;
  const bool is_async = to_bool(op, "async_op", async_op);
  if (hints.is_none() && timeout.is_none() && options.is_none()) {
    return without_gil([&] { return operation(is_async, kNone); });
  }
  const OpOptions merged = to_options<Options>(op, hints, timeout, options);
  return without_gil([&] { return operation(is_async, merged); });
}

}  // namespace torch_overlap::python
