#include <pybind11/stl.h>

#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/propagate.h"
#include "torch_overlap/python/bind_mesh.h"

namespace torch_overlap::python {
namespace {

using mesh::CostModel;
using mesh::Elementwise;
using mesh::Layout;
using mesh::OpRule;
using mesh::PropagateOptions;
using mesh::Propagation;
using mesh::Shape;
using mesh::Strategy;

Elementwise to_elementwise(const std::string& name) {
  if (name == "nonlinear") return Elementwise::kNonlinear;
  if (name == "linear") return Elementwise::kLinear;
  if (name == "move") return Elementwise::kMove;
  if (name == "add") return Elementwise::kAdd;
  if (name == "multiply") return Elementwise::kMultiply;
  if (name == "divide") return Elementwise::kDivide;
  fail(ErrorKind::kValue,
       "OpRule.elementwise: expected nonlinear, linear, move, add, multiply or divide, got '", name,
       "'");
}

OpRule slice(const Shape& x, int64_t dim, const std::vector<std::pair<int64_t, int64_t>>& parts) {
  std::vector<mesh::Extent> extents;
  for (const auto& [begin, end] : parts) extents.push_back({begin, end - begin});
  return mesh::slice_rule(x, dim, extents);
}

Propagation run(const OpRule& rule, const std::vector<Layout>& inputs, const CostModel& cost,
                const std::optional<std::vector<int64_t>>& element_sizes,
                const std::vector<std::optional<Layout>>& wanted, bool explore, bool training) {
  const std::vector<int64_t> four(rule.inputs.size() + rule.outputs.size(), 4);
  const PropagateOptions options{.wanted = wanted, .training = training, .explore = explore};
  return mesh::propagate(rule, inputs, element_sizes.value_or(four), cost, options);
}

py::list shapes(const std::vector<mesh::Operand>& operands) {
  py::list out;
  for (const mesh::Operand& operand : operands) out.append(py::tuple(py::cast(operand.shape)));
  return out;
}

}  // namespace

void register_mesh_rules(py::module_& module) {
  py::class_<OpRule>(module, "OpRule",
                     R"(What one operator may do on parts of its operands, by factors.

str() shows it: "matmul: m k+, k+ n -> m n". A factor that is sharded is sharded in every operand that has it;
k+ leaves the outputs pending, k! must be whole.)")
      .def_static("einsum", &mesh::einsum_rule, py::arg("op"), py::arg("equation"),
                  py::arg("inputs"),
                  "One's own: \"b m k, k n -> b m n\", (a b) for joined factors, k! for whole.")
      .def_static(
          "elementwise",
          [](const std::string& op, const std::vector<Shape>& inputs, const std::string& how) {
            return mesh::elementwise_rule(op, inputs, to_elementwise(how));
          },
          py::arg("op"), py::arg("inputs"), py::arg("how") = "nonlinear",
          "`how` treats pending inputs: nonlinear, linear, move, add, multiply or divide.")
      .def_static("matmul", &mesh::matmul_rule, py::arg("a"), py::arg("b"), "torch.matmul.")
      .def_static("linear", &mesh::linear_rule, py::arg("x"), py::arg("weight"),
                  py::arg("has_bias") = false, "nn.Linear: the weight is [out, in].")
      .def_static("reduction", &mesh::reduction_rule, py::arg("op"), py::arg("x"),
                  py::arg("dims") = std::vector<int64_t>(), py::arg("keepdim") = false,
                  "sum, mean, amax, amin, prod; no dims: all.")
      .def_static("reshape", &mesh::reshape_rule, py::arg("from_shape"), py::arg("to_shape"),
                  "view, reshape, flatten, squeeze, unsqueeze.")
      .def_static("transpose", &mesh::transpose_rule, py::arg("x"), py::arg("order"),
                  "Output dimension d is input dimension order[d].")
      .def_static("broadcast", &mesh::broadcast_rule, py::arg("from_shape"), py::arg("to_shape"),
                  "expand.")
      .def_static("concat", &mesh::concat_rule, py::arg("inputs"), py::arg("dim"), "torch.cat.")
      .def_static("slice", &slice, py::arg("x"), py::arg("dim"), py::arg("parts"),
                  "An output for each (begin, end): slice, split, chunk.")
      .def_static("take", &mesh::take_rule, py::arg("table"), py::arg("index"), py::arg("dim") = 0,
                  "index_select, embedding; a sharded table is looked up by parts.")
      .def_static("along", &mesh::along_rule, py::arg("op"), py::arg("x"), py::arg("dims"),
                  "softmax, cumsum, sort, flip: whole along `dims`.")
      .def_static("norm", &mesh::norm_rule, py::arg("x"), py::arg("normalized_dims") = 1,
                  py::arg("num_weights") = 0, "layer_norm, rms_norm over the last dimensions.")
      .def_static("conv", &mesh::conv_rule, py::arg("x"), py::arg("weight"), py::arg("output"),
                  py::arg("groups") = 1, py::arg("has_bias") = false, "conv1d, conv2d, conv3d.")
      .def_static("attention", &mesh::attention_rule, py::arg("query"), py::arg("key"),
                  py::arg("value"), py::arg("is_causal") = false, "scaled_dot_product_attention.")
      .def_static("opaque", &mesh::opaque_rule, py::arg("op"), py::arg("inputs"),
                  py::arg("outputs"), "What nobody knows: whole tensors in and out.")
      .def_readonly("op", &OpRule::op, "The operator's name.")
      .def_readonly("note", &OpRule::note, "What a rank does apart from running it on its parts.")
      .def_property_readonly(
          "inputs", [](const OpRule& self) { return shapes(self.inputs); }, "Global shapes.")
      .def_property_readonly(
          "outputs", [](const OpRule& self) { return shapes(self.outputs); }, "Global shapes.")
      .def("__str__", &OpRule::str)
      .def("__repr__", [](const OpRule& self) { return "OpRule(" + self.str() + ")"; });

  py::class_<Strategy>(module, "Strategy", "One way to run an operator.")
      .def_readonly("inputs", &Strategy::inputs, "Layouts that the operator needs.")
      .def_readonly("outputs", &Strategy::outputs, "Layouts that it leaves.")
      .def_readonly("roles", &Strategy::roles, "\"dp on m, tp on k\".")
      .def_readonly("reshard", &Strategy::reshard, "Seconds to bring the inputs there.")
      .def_readonly("compute", &Strategy::compute, "Seconds of the local operator.")
      .def_readonly("after", &Strategy::after,
                    "Seconds until the outputs are as wanted; a share of what ends pending ones.")
      .def_readonly("gradients", &Strategy::gradients, "Seconds to reduce the inputs' gradients.")
      .def_property_readonly(
          "seconds", [](const Strategy& self) { return self.seconds(); }, "All but the gradients.")
      .def("__repr__", [](const Strategy& self) { return "Strategy(" + self.roles + ")"; });

  py::class_<Propagation>(module, "Propagation",
                          "How an operator runs on inputs that lie so, and why.")
      .def_property_readonly(
          "inputs", [](const Propagation& self) { return self.chosen.inputs; },
          "Layouts that the operator needs.")
      .def_property_readonly(
          "outputs", [](const Propagation& self) { return self.chosen.outputs; },
          "Layouts that it leaves.")
      .def_readonly("chosen", &Propagation::chosen, "The strategy.")
      .def_readonly("plans", &Propagation::plans, "From each input's layout to what is needed.")
      .def_readonly("strategies", &Propagation::strategies, "All, the cheapest first.")
      .def_property_readonly("seconds", &Propagation::seconds, "Of the chosen one.")
      .def("explain", &Propagation::explain, "The choice and what it was compared with.")
      .def("__repr__",
           [](const Propagation& self) { return "Propagation(" + self.chosen.roles + ")"; });

  module.def("propagate", &run, py::arg("rule"), py::arg("inputs"), py::arg("cost"),
             py::arg("element_sizes") = py::none(),
             py::arg("wanted") = std::vector<std::optional<Layout>>(), py::arg("explore") = false,
             py::arg("training") = false, py::call_guard<py::gil_scoped_release>(),
             "The cheapest way to run an operator on inputs that lie so. `element_sizes`: of each "
             "input, then of "
             "each output (default 4); `wanted`: layouts of the outputs; `explore`: also ways that "
             "no operand "
             "suggests.");
}

}  // namespace torch_overlap::python
