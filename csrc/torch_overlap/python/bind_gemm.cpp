#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/grouped.h"
#include "torch_overlap/gemm/options.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

// Documented in torch_overlap/gemm.py.
namespace torch_overlap::python {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

OptionalTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

template <at::Tensor GemmOperand::* member>
OptionalTensor of_operand(const GemmOperand& operand) {
  return or_none(operand.*member);
}

template <at::Tensor GemmArgs::* member>
OptionalTensor of_args(const GemmArgs& args) {
  return or_none(args.*member);
}

template <at::Tensor GemmEpilogue::* member>
OptionalTensor of_epilogue(const GemmArgs& args) {
  return or_none(args.epilogue.*member);
}

GemmOperand make_gemm_operand(const at::Tensor& data, bool transposed, int64_t scaling,
                              const OptionalTensor& scale_inv, bool swizzled,
                              const OptionalTensor& columnwise_data,
                              const OptionalTensor& columnwise_scale_inv) {
  return {.data = data,
          .transposed = transposed,
          .scaling = scaling_mode("GemmOperand", scaling),
          .scale_inv = or_undefined(scale_inv),
          .swizzled = swizzled,
          .columnwise_data = or_undefined(columnwise_data),
          .columnwise_scale_inv = or_undefined(columnwise_scale_inv)};
}

GemmArgs make_gemm_args(const GemmOperand& lhs, const GemmOperand& rhs, const at::Tensor& out,
                        const OptionalTensor& bias, bool gelu, const OptionalTensor& pre_gelu_out,
                        const OptionalTensor& gelu_input, const OptionalTensor& bias_grad,
                        const OptionalTensor& residual, bool accumulate, bool use_split_accumulator,
                        const OptionalTensor& out_scale, const OptionalTensor& out_amax,
                        int sm_target, const OptionalTensor& workspace) {
  return {.lhs = lhs,
          .rhs = rhs,
          .out = out,
          .epilogue = {.bias = or_undefined(bias),
                       .gelu = gelu,
                       .pre_gelu_out = or_undefined(pre_gelu_out),
                       .gelu_input = or_undefined(gelu_input),
                       .bias_grad = or_undefined(bias_grad),
                       .residual = or_undefined(residual)},
          .accumulate = accumulate,
          .use_split_accumulator = use_split_accumulator,
          .out_scale = or_undefined(out_scale),
          .out_amax = or_undefined(out_amax),
          .sm_target = sm_target,
          .workspace = or_undefined(workspace)};
}

py::dict statistics() {
  const GemmStatistics now = gemm_statistics();
  py::dict result;
  result["calls"] = now.calls;
  result["plans"] = now.plans;
  result["queries"] = now.queries;
  result["measured"] = now.measured;
  result["composed"] = now.composed;
  return result;
}

void bind_operand(py::module_& module) {
  py::class_<GemmOperand>(module, "GemmOperand")
      .def(py::init(&make_gemm_operand), py::arg("data"), py::arg("transposed") = false,
           py::kw_only(), py::arg("scaling") = 0, py::arg("scale_inv") = py::none(),
           py::arg("swizzled") = false, py::arg("columnwise_data") = py::none(),
           py::arg("columnwise_scale_inv") = py::none())
      .def_readonly("data", &GemmOperand::data)
      .def_readonly("transposed", &GemmOperand::transposed)
      .def_readonly("scaling", &GemmOperand::scaling)
      .def_readonly("swizzled", &GemmOperand::swizzled)
      .def_property_readonly("scale_inv", &of_operand<&GemmOperand::scale_inv>)
      .def_property_readonly("columnwise_data", &of_operand<&GemmOperand::columnwise_data>)
      .def_property_readonly("columnwise_scale_inv",
                             &of_operand<&GemmOperand::columnwise_scale_inv>);
}

void bind_args(py::module_& module) {
  py::class_<GemmArgs>(module, "GemmArgs")
      .def(py::init(&make_gemm_args), py::arg("lhs"), py::arg("rhs"), py::arg("out"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("gelu") = false,
           py::arg("pre_gelu_out") = py::none(), py::arg("gelu_input") = py::none(),
           py::arg("bias_grad") = py::none(), py::arg("residual") = py::none(),
           py::arg("accumulate") = false, py::arg("use_split_accumulator") = false,
           py::arg("out_scale") = py::none(), py::arg("out_amax") = py::none(),
           py::arg("sm_target") = 0, py::arg("workspace") = py::none())
      .def_readonly("lhs", &GemmArgs::lhs)
      .def_readonly("rhs", &GemmArgs::rhs)
      .def_readonly("out", &GemmArgs::out)
      .def_property_readonly("bias", &of_epilogue<&GemmEpilogue::bias>)
      .def_property_readonly("gelu", [](const GemmArgs& args) { return args.epilogue.gelu; })
      .def_property_readonly("pre_gelu_out", &of_epilogue<&GemmEpilogue::pre_gelu_out>)
      .def_property_readonly("gelu_input", &of_epilogue<&GemmEpilogue::gelu_input>)
      .def_property_readonly("bias_grad", &of_epilogue<&GemmEpilogue::bias_grad>)
      .def_property_readonly("residual", &of_epilogue<&GemmEpilogue::residual>)
      .def_readonly("accumulate", &GemmArgs::accumulate)
      .def_readonly("use_split_accumulator", &GemmArgs::use_split_accumulator)
      .def_property_readonly("out_scale", &of_args<&GemmArgs::out_scale>)
      .def_property_readonly("out_amax", &of_args<&GemmArgs::out_amax>)
      .def_readonly("sm_target", &GemmArgs::sm_target)
      .def_property_readonly("workspace", &of_args<&GemmArgs::workspace>)
      .def(
          "rows",
          [](const GemmArgs& args, int64_t begin, int64_t length) {
            return gemm_rows("gemm_rows", args, begin, length);
          },
          py::arg("begin"), py::arg("length"))
      .def(
          "columns",
          [](const GemmArgs& args, int64_t begin, int64_t length) {
            return gemm_columns("gemm_columns", args, begin, length);
          },
          py::arg("begin"), py::arg("length"));
}

}  // namespace

void register_gemm(py::module_& module) {
  py::native_enum<ScalingMode>(module, "ScalingMode", "enum.IntEnum",
                               "How the 8-bit values of an operand are scaled.")
      .value("NO_SCALING", ScalingMode::NO_SCALING)
      .value("DELAYED_TENSOR_SCALING", ScalingMode::DELAYED_TENSOR_SCALING)
      .value("MXFP8_1D_SCALING", ScalingMode::MXFP8_1D_SCALING)
      .value("CURRENT_TENSOR_SCALING", ScalingMode::CURRENT_TENSOR_SCALING)
      .value("BLOCK_1D_SCALING", ScalingMode::BLOCK_1D_SCALING)
      .value("BLOCK_2D_SCALING", ScalingMode::BLOCK_2D_SCALING)
      .value("ROW_SCALING", ScalingMode::ROW_SCALING)
      .finalize();
  auto own = module.def_submodule("_gemm", "Products; see torch_overlap.gemm.");
  bind_operand(own);
  bind_args(own);
  own.def(
      "gemm", [](const GemmArgs& args) { gemm("gemm", args); }, py::arg("args"),
      py::call_guard<py::gil_scoped_release>());
  own.def(
      "grouped_gemm",
      [](const std::vector<GemmArgs>& group) { grouped_gemm("grouped_gemm", group); },
      py::arg("group"), py::call_guard<py::gil_scoped_release>());
  own.def(
      "own_gemm_kernels",
      [](const GemmArgs& args) { return own_gemm_kernels("own_gemm_kernels", args); },
      py::arg("args"));
  own.def(
      "run_own_gemm_kernel",
      [](const GemmArgs& args, const std::string& kernel) {
        run_own_gemm_kernel("run_own_gemm_kernel", args, kernel);
      },
      py::arg("args"), py::arg("kernel"), py::call_guard<py::gil_scoped_release>());
  own.def("set_gemm_tuning", &set_gemm_tuning, py::arg("tuning"));
  own.def("set_gemm_mxfp8", &set_gemm_mxfp8, py::arg("path"));
  own.def("gemm_statistics", &statistics);
  own.def("reset_gemm_statistics", &reset_gemm_statistics);
}

}  // namespace torch_overlap::python
