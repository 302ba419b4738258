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

constexpr const char* kOperandDoc =
    R"(One matrix of a product. Nothing is checked or copied until the product is computed.

data: [rows, columns], rows contiguous; they may be part of longer ones. transposed: the product takes data^T.
scaling: a ScalingMode; 8-bit data is value = data * scale_inv. scale_inv: with one factor for the tensor a float32 of one
element; else of the matrix [rows, k] as it is multiplied, [rows, blocks along k] (128 x 128: [blocks of rows, blocks
along k]), float32, for MXFP8 the bytes of powers of two (float8_e8m0fnu or uint8), which `swizzled` says are in the order
of the tensor cores. columnwise_data, columnwise_scale_inv: data^T, contiguous, quantized along its own rows, which is
read where the rows of data do not run along k.

InvalidValueError for a number that is no ScalingMode.)";

constexpr const char* kArgsDoc =
    R"(One product, out [m, n] = epilogue(op(lhs) [m, k] @ op(rhs) [k, n]), as a value: torch_overlap.gemm.gemm computes it.

dtypes, alignment and errors: see gemm. Everything is computed in float32 (float64) and rounded once. Vectors and
matrices of the epilogue are float32, float16 or bfloat16 (float64 with such operands), of unit stride in their last
dimension; each is optional:

bias [n] is added; gelu: GELU (tanh form) follows, and pre_gelu_out [m, n] becomes what it is taken of.
gelu_input [m, n]: the product is multiplied with the derivative of GELU there; not with bias or gelu.
bias_grad: becomes the gradient of a bias; with gelu_input [n], the sum of the rows of what is put in out without a
    residual, else [m], the sum of op(lhs) over k.
residual [m, n], of out's dtype, is added behind all of that; accumulate: what out holds is. Not for 8-bit out.
use_split_accumulator: 8-bit operands on Hopper promote partial sums to float32 as they grow: slower, more exact.
out_scale, out_amax: one float32 each, for 8-bit out = value * out_scale; out_amax becomes the largest |value|.
sm_target: how many SMs the product is made for; 0: all.
workspace: contiguous memory for the library; None: a cached one of the device and stream.)";

constexpr const char* kRowsDoc =
    R"(The product of the rows [begin, begin + length) of out, and so of op(lhs): views, nothing is copied or computed.

Raises: InvalidValueError for rows outside of out; UnsupportedError where they cannot be cut: scales that are swizzled or
of 128 x 128 blocks away from multiples of 128, out_amax, bias_grad with gelu_input; and what gemm raises.)";

constexpr const char* kColumnsDoc =
    R"(The product of the columns [begin, begin + length) of out, and so of op(rhs) and the bias: views, nothing is computed.

A bias_grad without gelu_input stays with the columns that begin at 0. Raises as rows() does, but takes bias_grad.)";

void bind_operand(py::module_& module) {
  py::class_<GemmOperand>(module, "GemmOperand", kOperandDoc)
      .def(py::init(&make_gemm_operand), py::arg("data"), py::arg("transposed") = false,
           py::kw_only(), py::arg("scaling") = 0, py::arg("scale_inv") = py::none(),
           py::arg("swizzled") = false, py::arg("columnwise_data") = py::none(),
           py::arg("columnwise_scale_inv") = py::none())
      .def_readonly("data", &GemmOperand::data,
                    "The matrix: 2 dimensions, rows contiguous (stride(1) == 1).")
      .def_readonly("transposed", &GemmOperand::transposed, "Whether the product takes data^T.")
      .def_readonly("scaling", &GemmOperand::scaling, "The ScalingMode of 8-bit data.")
      .def_readonly("swizzled", &GemmOperand::swizzled,
                    "MXFP8: whether scale_inv is in the order that the tensor cores read.")
      .def_property_readonly("scale_inv", &of_operand<&GemmOperand::scale_inv>,
                             "Its factors, or None.")
      .def_property_readonly("columnwise_data", &of_operand<&GemmOperand::columnwise_data>,
                             "data^T, quantized along its own rows, or None.")
      .def_property_readonly("columnwise_scale_inv",
                             &of_operand<&GemmOperand::columnwise_scale_inv>,
                             "The factors of columnwise_data, or None.");
}

void bind_args(py::module_& module) {
  py::class_<GemmArgs>(module, "GemmArgs", kArgsDoc)
      .def(py::init(&make_gemm_args), py::arg("lhs"), py::arg("rhs"), py::arg("out"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("gelu") = false,
           py::arg("pre_gelu_out") = py::none(), py::arg("gelu_input") = py::none(),
           py::arg("bias_grad") = py::none(), py::arg("residual") = py::none(),
           py::arg("accumulate") = false, py::arg("use_split_accumulator") = false,
           py::arg("out_scale") = py::none(), py::arg("out_amax") = py::none(),
           py::arg("sm_target") = 0, py::arg("workspace") = py::none())
      .def_readonly("lhs", &GemmArgs::lhs, "The GemmOperand on the left.")
      .def_readonly("rhs", &GemmArgs::rhs, "The GemmOperand on the right.")
      .def_readonly("out", &GemmArgs::out, "What is written, [m, n].")
      .def_property_readonly("bias", &of_epilogue<&GemmEpilogue::bias>,
                             "What is added, [n], or None.")
      .def_property_readonly(
          "gelu", [](const GemmArgs& args) { return args.epilogue.gelu; },
          "Whether GELU (tanh form) follows the bias.")
      .def_property_readonly("pre_gelu_out", &of_epilogue<&GemmEpilogue::pre_gelu_out>,
                             "Becomes what GELU is taken of, [m, n]; or None.")
      .def_property_readonly("gelu_input", &of_epilogue<&GemmEpilogue::gelu_input>,
                             "Where the derivative of GELU is taken, [m, n]; or None.")
      .def_property_readonly(
          "bias_grad", &of_epilogue<&GemmEpilogue::bias_grad>,
          "Becomes the gradient of a bias, [n] with gelu_input, else [m]; or None.")
      .def_property_readonly("residual", &of_epilogue<&GemmEpilogue::residual>,
                             "What is added behind the epilogue, [m, n]; or None.")
      .def_readonly("accumulate", &GemmArgs::accumulate,
                    "Whether the result is added to what out holds.")
      .def_readonly("use_split_accumulator", &GemmArgs::use_split_accumulator,
                    "Whether partial sums of 8-bit operands are promoted to float32 as they grow.")
      .def_property_readonly("out_scale", &of_args<&GemmArgs::out_scale>,
                             "The factor of an 8-bit out, or None.")
      .def_property_readonly("out_amax", &of_args<&GemmArgs::out_amax>,
                             "Becomes the largest |value| of an 8-bit out; or None.")
      .def_readonly("sm_target", &GemmArgs::sm_target,
                    "How many SMs the product is made for; 0: all.")
      .def_property_readonly("workspace", &of_args<&GemmArgs::workspace>,
                             "Memory for the library, or None.")
      .def(
          "rows",
          [](const GemmArgs& args, int64_t begin, int64_t length) {
            return gemm_rows("gemm_rows", args, begin, length);
          },
          py::arg("begin"), py::arg("length"), kRowsDoc)
      .def(
          "columns",
          [](const GemmArgs& args, int64_t begin, int64_t length) {
            return gemm_columns("gemm_columns", args, begin, length);
          },
          py::arg("begin"), py::arg("length"), kColumnsDoc);
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
