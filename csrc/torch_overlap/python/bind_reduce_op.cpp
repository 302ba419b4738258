#include <torch/csrc/autograd/python_variable.h>

#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

constexpr RedOpType kPlainTypes[] = {RedOpType::SUM,  RedOpType::PRODUCT, RedOpType::MIN,
                                     RedOpType::MAX,  RedOpType::BAND,    RedOpType::BOR,
                                     RedOpType::BXOR, RedOpType::AVG};

ReduceOp premul_sum(const py::object& factor) {
  if (THPVariable_Check(factor.ptr())) return ReduceOp::premul_sum(factor.cast<at::Tensor>());
  const double number = PyFloat_AsDouble(factor.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(ErrorKind::kType,
         "ReduceOp.PREMUL_SUM: expected a number or a one-element tensor for factor, got ",
         describe(factor));
  }
  return ReduceOp::premul_sum(number);
}

py::object factor_of(const ReduceOp& op) {
  if (const auto* tensor = std::get_if<at::Tensor>(&op.factor())) return py::cast(*tensor);
  if (const auto* number = std::get_if<double>(&op.factor())) return py::cast(*number);
  return py::none();
}

}  // namespace

void register_reduce_op(py::module_& module) {
  bind_enum<RedOpType>(module, "RedOpType", "enum.Enum", "Kinds of reduction.", 9);

  py::class_<ReduceOp> op(module, "ReduceOp",
                          R"(The reduction of the ranks' elements. Immutable, comparable, hashable.

SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR and BXOR are class attributes. PREMUL_SUM(factor) is a
function: each rank's input is multiplied by that rank's own factor before the sum. bool tensors are
reduced logically; complex tensors support SUM, AVG and PREMUL_SUM; AVG of integers truncates toward
zero.

Args:
    opType: the RedOpType; any but PREMUL_SUM, which needs a factor.

Raises:
    InvalidTypeError: opType is PREMUL_SUM.)");
  op.def(py::init<RedOpType>())
      .def_static("_premul_sum", &premul_sum)
      .def_property_readonly("type", &ReduceOp::type, "The RedOpType of the reduction.")
      .def_property_readonly(
          "factor", &factor_of,
          "Factor of a PREMUL_SUM, a number or a one-element tensor; otherwise None.")
      .def(
          "__eq__", [](const ReduceOp& a, const ReduceOp& b) { return a == b; }, py::is_operator())
      .def(
          "__ne__", [](const ReduceOp& a, const ReduceOp& b) { return !(a == b); },
          py::is_operator())
      .def("__hash__", &ReduceOp::hash)
      .def("__repr__", &ReduceOp::repr)
      .def("__copy__", [](const py::object& self) { return self; })
      .def("__deepcopy__", &deepcopy_as_self, py::arg("memo"))
      .def(py::pickle(
          [](const ReduceOp& self) { return py::make_tuple(self.type(), factor_of(self)); },
          [](const py::tuple& state) {
            return state[1].is_none() ? ReduceOp(state[0].cast<RedOpType>()) : premul_sum(state[1]);
          }));
  for (const RedOpType type : kPlainTypes)
    op.attr(std::string(to_string(type)).c_str()) = ReduceOp(type);
}

}  // namespace torch_overlap::python
