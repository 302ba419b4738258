#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/comm/reduce_op.h"

// Between Python values and ours. Optional arguments come as handles and are looked at only when
// they are not None: an operation without them pays nothing for them.
namespace torch_overlap::python {

namespace py = pybind11;

// A Python object that C++ may drop on any thread. After the interpreter's end it is let go
// unfreed.
using SharedObject = std::shared_ptr<PyObject>;
SharedObject share(py::object object);
py::object borrow(const SharedObject& object);

// __deepcopy__ of an object that has no copies: itself.
py::object deep_copy_is_itself(const py::object& self, const py::dict& memo);

// "numpy.ndarray", "int".
std::string type_name(py::handle type);
// How errors show a value: "5 (int)"; the type alone where its text may be long, or on a GPU.
std::string describe(py::handle value);

// `name` is the argument's in errors. A bool of Python or NumPy.
bool to_bool(std::string_view op, std::string_view name, py::handle value);
std::optional<bool> to_bool_or_none(std::string_view op, std::string_view name, py::handle value);
std::optional<std::string> to_string_or_none(std::string_view op, std::string_view name,
                                             py::handle value);
int to_int(std::string_view op, std::string_view name, int64_t value);

// A timedelta, rounded up to milliseconds (0 would mean the default). None is nullopt.
std::optional<Milliseconds> to_timeout(std::string_view op, py::handle timeout);
py::object from_timeout(Milliseconds timeout);

// A dict of strings; None is empty.
Hints to_hints(std::string_view op, py::handle hints, std::string_view name = "hints");
// Read-only: a write to a copy would be lost without notice.
py::object from_hints(const Hints& hints);

// The object belongs to `op`, which the caller's arguments hold.
const ReduceOp& to_reduce_op(std::string_view name, py::handle op);

// The Python exception for a C++ one.
py::object from_exception(const std::exception_ptr& error);
// The class of an error's kind. The reference is the module's.
py::handle class_of(ErrorKind kind);

// Keeps the warnings of a call, which has no GIL, until they can become Python's.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages_.push_back(warning.msg()); }
  // Needs the GIL. Throws where the user's filter makes errors of warnings.
  void emit();

 private:
  std::vector<std::string> messages_;
};

// Runs `body` without the GIL; what it warns of becomes Python warnings.
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

// `expected`: the class.
[[noreturn]] void fail_options(std::string_view op, py::handle expected, py::handle got);

// `hints` and `timeout` over those of `options`.
template <typename Options>
OpOptions to_options(std::string_view op, py::handle hints, py::handle timeout,
                     py::handle options) {
  OpOptions out;
  if (!options.is_none()) {
    if (!py::isinstance<Options>(options)) fail_options(op, py::type::of<Options>(), options);
    out = options.cast<const Options&>();
  }
  if (!hints.is_none()) {
    for (auto& [key, value] : to_hints(op, hints)) out.hints.insert_or_assign(key, value);
  }
  if (const auto value = to_timeout(op, timeout)) out.timeout = *value;
  return out;
}

}  // namespace torch_overlap::python
