// pybind11 raises a plain TypeError with a page of text when a function does not take what it was
// called with. Here that becomes our error. All functions of the module have one C function of
// pybind11's, its dispatcher, and find their overloads by the object that they are bound to; so one
// C function around it is enough, and costs nothing else where arguments are right.

#include <algorithm>
#include <string>
#include <unordered_map>

#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using Dispatch = PyObject* (*)(PyObject*, PyObject*, PyObject*);

Dispatch dispatcher = nullptr;

// By the object that a function is bound to: how errors name it. Never destroyed, as the module.
std::unordered_map<PyObject*, std::string>& function_names() {
  static auto* const names = new std::unordered_map<PyObject*, std::string>;
  return *names;
}

void replace_all(std::string& text, const std::string& old, const std::string& by) {
  for (size_t at = 0; (at = text.find(old, at)) != std::string::npos; at += by.size()) {
    text.replace(at, old.size(), by);
  }
}

// "(tensor: torch.Tensor, dst: int)" of each line "    1. (self: ..., tensor: ...) -> ...", or, of
// a constructor, "    1. torch_overlap._C.P2POp(...)".
std::string signatures(const std::string& message) {
  std::string all;
  for (const auto& line : split_string(message, '\n')) {
    if (line.rfind("Invoked with", 0) == 0) break;
    const size_t begin = line.find('(');
    const size_t end = line.rfind(')', line.rfind(" -> "));
    if (line.rfind("    ", 0) != 0 || begin == std::string::npos || end <= begin) continue;
    std::string arguments = line.substr(begin + 1, end - begin - 1);
    if (arguments.rfind("self", 0) == 0) {
      const size_t next = arguments.find(", ");
      arguments = next == std::string::npos ? "" : arguments.substr(next + 2);
    }
    all += concat(all.empty() ? "(" : " or (", arguments, ")");
  }
  replace_all(all, "typing.SupportsInt", "int");
  replace_all(all, "typing.SupportsFloat", "float");
  replace_all(all, "collections.abc.", "");
  replace_all(all, "torch_overlap._C.", "");
  return all;
}

// What can be said in a word; of others the type: a tensor's text is long, and may be on a GPU.
std::string in_a_word(py::handle value) {
  constexpr size_t kLongest = 60;
  const bool is_plain = value.is_none() || PyLong_Check(value.ptr()) ||
                        PyFloat_Check(value.ptr()) || PyUnicode_Check(value.ptr());
  if (!is_plain) return std::string(py::str(py::type::of(value).attr("__name__")));
  std::string text = py::repr(value);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

std::string given(py::handle arguments, py::handle keywords, bool has_self) {
  std::string all;
  const auto add = [&](const std::string& one) { all += concat(all.empty() ? "" : ", ", one); };
  size_t index = 0;
  for (const py::handle value : arguments) {
    if (index++ > 0 || !has_self) add(in_a_word(value));
  }
  if (keywords) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(keywords)) {
      add(concat(std::string(py::str(key)), "=", in_a_word(value)));
    }
  }
  return concat("(", all, ")");
}

PyObject* dispatch(PyObject* self, PyObject* arguments, PyObject* keywords) {
  PyObject* result = dispatcher(self, arguments, keywords);
  if (__builtin_expect(result != nullptr || PyErr_Occurred() != PyExc_TypeError, 1)) return result;
  py::error_already_set error;
  const std::string message = py::str(error.value());
  const auto name = function_names().find(self);
  if (message.find("(): incompatible ") == std::string::npos || name == function_names().end()) {
    error.restore();
    return nullptr;
  }
  const bool has_self = message.find("(self") != std::string::npos ||
                        message.find("incompatible constructor") != std::string::npos;
  const auto text = concat(name->second, ": expected arguments ", signatures(message), ", got ",
                           given(arguments, keywords, has_self));
  PyErr_SetString(class_of(ErrorKind::kType).ptr(), text.c_str());
  return nullptr;
}

// `function`: of pybind11, or anything else, which stays as it is.
void guard(py::handle function, const std::string& name) {
  PyObject* plain = function.ptr();
  if (plain == nullptr) return;
  if (PyInstanceMethod_Check(plain)) plain = PyInstanceMethod_GET_FUNCTION(plain);
  if (!PyCFunction_Check(plain)) return;
  PyMethodDef* method = reinterpret_cast<PyCFunctionObject*>(plain)->m_ml;
  if (reinterpret_cast<Dispatch>(reinterpret_cast<void*>(method->ml_meth)) != dispatcher) return;
  method->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&dispatch));
  function_names().emplace(PyCFunction_GET_SELF(plain), name);
}

// Functions that only this package calls stand for the one without the underscore.
std::string public_name(const std::string& name) {
  return name.rfind("__", 0) == 0 ? name
                                  : name.substr(std::min(name.find_first_not_of('_'), name.size()));
}

void guard_class(py::handle type) {
  const std::string class_name = py::str(type.attr("__name__"));
  for (const auto& [key, value] : type.attr("__dict__").attr("copy")().cast<py::dict>()) {
    const std::string name = py::str(key);
    if (py::isinstance(value, py::handle(reinterpret_cast<PyObject*>(&PyProperty_Type)))) {
      guard(value.attr("fget"), concat(class_name, ".", name));
      guard(value.attr("fset"), concat(class_name, ".", name));
    } else if (py::isinstance(value,
                              py::handle(reinterpret_cast<PyObject*>(&PyStaticMethod_Type)))) {
      guard(value.attr("__func__"), concat(class_name, ".", name));
    } else {
      guard(value, name == "__init__" ? class_name : public_name(name));
    }
  }
}

void guard_module(py::handle module) {
  for (const auto& [key, value] : module.attr("__dict__").attr("copy")().cast<py::dict>()) {
    if (PyType_Check(value.ptr())) {
      guard_class(value);
    } else if (PyModule_Check(value.ptr())) {
      guard_module(value);
    } else {
      guard(value, public_name(py::str(key)));
    }
  }
}

}  // namespace

void name_argument_errors(py::module_& module) {
  const py::object any = module.attr("get_comm");
  dispatcher = reinterpret_cast<Dispatch>(
      reinterpret_cast<void*>(reinterpret_cast<PyCFunctionObject*>(any.ptr())->m_ml->ml_meth));
  guard_module(module);
}

}  // namespace torch_overlap::python
