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
  py::class_<OpRule>(
      module, "OpRule",
      R"(Declares how an operator runs on sharded operands, by the factors of their dimensions.

str() returns it as text, such as "matmul: m k+, k+ n -> m n". A sharded factor is sharded in every
operand that has it. Sharding k+ makes the outputs partial; k! cannot be sharded. All shapes are
global.)")
      .def_static(
          "einsum", &mesh::einsum_rule, py::arg("op"), py::arg("equation"), py::arg("inputs"),
          "Returns a custom rule from an `equation` such as \"b m k, k n -> b m n\": one name per "
          "dimension of the `inputs` (shapes). (a b) is a dimension of two factors, k! cannot be "
          "sharded, and a name in no output is summed. `op` is the operator's name.")
      .def_static(
          "elementwise",
          [](const std::string& op, const std::vector<Shape>& inputs, const std::string& how) {
            return mesh::elementwise_rule(op, inputs, to_elementwise(how));
          },
          py::arg("op"), py::arg("inputs"), py::arg("how") = "nonlinear",
          "Returns the rule of an elementwise `op` on `inputs` (shapes), broadcast as in torch. "
          "`how` selects which inputs may be partial: nonlinear (none), linear, move, add, "
          "multiply (at most one) or divide (the first).")
      .def_static("matmul", &mesh::matmul_rule, py::arg("a"), py::arg("b"),
                  "Returns the rule of torch.matmul for the shapes `a` and `b`.")
      .def_static("linear", &mesh::linear_rule, py::arg("x"), py::arg("weight"),
                  py::arg("has_bias") = false,
                  "Returns the rule of nn.Linear for the shapes `x` [..., in] and `weight` [out, "
                  "in], with a bias if `has_bias`.")
      .def_static("reduction", &mesh::reduction_rule, py::arg("op"), py::arg("x"),
                  py::arg("dims") = std::vector<int64_t>(), py::arg("keepdim") = false,
                  "Returns the rule of `op` (sum, mean, amax, amin or prod) over `dims` of shape "
                  "`x`; all dimensions if empty. `keepdim` is as in torch.")
      .def_static("reshape", &mesh::reshape_rule, py::arg("from_shape"), py::arg("to_shape"),
                  "Returns the rule of view, reshape, flatten, squeeze and unsqueeze from "
                  "`from_shape` to `to_shape`.")
      .def_static("transpose", &mesh::transpose_rule, py::arg("x"), py::arg("order"),
                  "Returns the rule of permute and transpose of shape `x`: output dimension d is "
                  "input dimension order[d].")
      .def_static("broadcast", &mesh::broadcast_rule, py::arg("from_shape"), py::arg("to_shape"),
                  "Returns the rule of expand from `from_shape` to `to_shape`.")
      .def_static("concat", &mesh::concat_rule, py::arg("inputs"), py::arg("dim"),
                  "Returns the rule of torch.cat of `inputs` (shapes) along `dim`.")
      .def_static("slice", &slice, py::arg("x"), py::arg("dim"), py::arg("parts"),
                  "Returns the rule of slice, split and chunk of shape `x` along `dim`: one output "
                  "for each (begin, end) of `parts`.")
      .def_static("take", &mesh::take_rule, py::arg("table"), py::arg("index"), py::arg("dim") = 0,
                  "Returns the rule of index_select and embedding for the shapes `table` and "
                  "`index`. If the table is sharded along `dim`, each rank looks up its part.")
      .def_static("along", &mesh::along_rule, py::arg("op"), py::arg("x"), py::arg("dims"),
                  py::arg("outputs") = std::vector<mesh::Shape>{},
                  "Returns the rule of an `op` that needs whole `dims` of shape `x`: softmax, "
                  "cumsum, sort, flip. `outputs`: shapes of its results, of other sizes along "
                  "`dims`, as those of pooling; none: one of shape `x`.")
      .def_static("norm", &mesh::norm_rule, py::arg("x"), py::arg("normalized_dims") = 1,
                  py::arg("num_weights") = 0,
                  "Returns the rule of layer_norm and rms_norm over the last `normalized_dims` "
                  "dimensions of shape `x`, with `num_weights` (0 to 2) weights of their shape.")
      .def_static("conv", &mesh::conv_rule, py::arg("x"), py::arg("weight"), py::arg("output"),
                  py::arg("groups") = 1, py::arg("has_bias") = false,
                  "Returns the rule of conv1d, conv2d and conv3d for the shapes `x`, `weight` and "
                  "`output`, with `groups`, and a bias if `has_bias`.")
      .def_static("attention", &mesh::attention_rule, py::arg("query"), py::arg("key"),
                  py::arg("value"), py::arg("is_causal") = false,
                  "Returns the rule of scaled_dot_product_attention for the shapes `query` [..., "
                  "heads, queries, depth], `key` and `value` [..., kv_heads, keys, depth]. If "
                  "`is_causal`, queries cannot be sharded.")
      .def_static("opaque", &mesh::opaque_rule, py::arg("op"), py::arg("inputs"),
                  py::arg("outputs"),
                  "Returns the rule of an unknown `op`, which needs whole `inputs` and computes "
                  "whole `outputs` (shapes).")
      .def_readonly("op", &OpRule::op, "Name of the operator.")
      .def_readonly("note", &OpRule::note,
                    "Work of a rank in addition to the operator on its parts; usually empty.")
      .def_property_readonly(
          "inputs", [](const OpRule& self) { return shapes(self.inputs); },
          "Global shapes of the inputs.")
      .def_property_readonly(
          "outputs", [](const OpRule& self) { return shapes(self.outputs); },
          "Global shapes of the outputs.")
      .def("__str__", &OpRule::str)
      .def("__repr__", [](const OpRule& self) { return "OpRule(" + self.str() + ")"; });

  py::class_<Strategy>(module, "Strategy", "One way to run an operator.")
      .def_readonly("inputs", &Strategy::inputs, "Layouts that the operator needs.")
      .def_readonly("outputs", &Strategy::outputs, "Layouts that the operator produces.")
      .def_readonly("roles", &Strategy::roles,
                    "Factors that each axis shards, as text: \"dp on m, tp on k\".")
      .def_readonly("reshard", &Strategy::reshard, "Seconds to reshard the inputs.")
      .def_readonly("compute", &Strategy::compute, "Seconds of the local operator.")
      .def_readonly("after", &Strategy::after,
                    "Seconds to reshard the outputs to the wanted layouts, or a share of the "
                    "reduction of partial ones.")
      .def_readonly("gradients", &Strategy::gradients,
                    "Seconds to reduce the partial gradients of the inputs.")
      .def_property_readonly(
          "seconds", [](const Strategy& self) { return self.seconds(); },
          "Seconds in total without gradients: reshard + compute + after.")
      .def("__repr__", [](const Strategy& self) { return "Strategy(" + self.roles + ")"; });

  py::class_<Propagation>(
      module, "Propagation",
      "The strategy that propagate() chose for an operator, and the alternatives.")
      .def_property_readonly(
          "inputs", [](const Propagation& self) { return self.chosen.inputs; },
          "Layouts that the operator needs.")
      .def_property_readonly(
          "outputs", [](const Propagation& self) { return self.chosen.outputs; },
          "Layouts that the operator produces.")
      .def_readonly("chosen", &Propagation::chosen, "The chosen Strategy.")
      .def_readonly(
          "plans", &Propagation::plans,
          "List of the Plan of each input, from its layout to the one that the operator needs.")
      .def_readonly("strategies", &Propagation::strategies,
                    "List of all compared Strategies, cheapest first.")
      .def_property_readonly("seconds", &Propagation::seconds, "Seconds of the chosen strategy.")
      .def("explain", &Propagation::explain,
           "Returns a report: the choice, the reshards of the inputs, and the alternatives with "
           "their times.")
      .def("__repr__",
           [](const Propagation& self) { return "Propagation(" + self.chosen.roles + ")"; });

  module.def("propagate", &run, py::arg("rule"), py::arg("inputs"), py::arg("cost"),
             py::arg("element_sizes") = py::none(),
             py::arg("wanted") = std::vector<std::optional<Layout>>(), py::arg("explore") = false,
             py::arg("training") = false, py::call_guard<py::gil_scoped_release>(),
             "Returns a Propagation: the cheapest strategy by `cost` of the operator with this "
             "`rule` on `inputs` (layouts). `element_sizes`: bytes per element of each input, then "
             "of each output; default 4. `wanted`: layout of each output, or None. `explore`: also "
             "considers strategies that no operand suggests. `training`: compares the times of a "
             "training step. Deterministic.");
}

}  // namespace torch_overlap::python
