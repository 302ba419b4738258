#include <pybind11/stl.h>

#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/grouped.h"
#include "torch_overlap/gemm/options.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

// torch_overlap/gemm.py documents these bindings.
namespace torch_overlap::python {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

OptionalTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

template <at::Tensor GemmOperand::* member>
OptionalTensor get_operand_tensor(const GemmOperand& operand) {
  return or_none(operand.*member);
}

template <at::Tensor GemmArgs::* member>
OptionalTensor get_args_tensor(const GemmArgs& args) {
  return or_none(args.*member);
}

template <at::Tensor GemmEpilogue::* member>
OptionalTensor get_epilogue_tensor(const GemmArgs& args) {
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
    R"(One matrix of a product. Nothing is validated or copied until the product is computed.

Args:
    data: tensor [rows, columns] with contiguous rows (stride(1) == 1). The row stride may exceed
        the row length.
    transposed: if True, the product uses data^T.
    scaling: a ScalingMode. The value of 8-bit data is data * scale_inv.
    scale_inv: inverse scales. With tensor scaling: one float32. Otherwise [rows, blocks along k] of
        the matrix [rows, k] as it is multiplied (ROW_SCALING: [rows, 1]; BLOCK_2D_SCALING: [blocks
        of rows, blocks along k]): float32, or for MXFP8 powers of two as bytes (float8_e8m0fnu or
        uint8).
    swizzled: if True, scale_inv is in the swizzled order of the tensor cores. MXFP8 only.
    columnwise_data: data^T, contiguous, quantized along its own rows. It is read instead of data if
        the rows of data do not run along k.
    columnwise_scale_inv: inverse scales of columnwise_data. With tensor scaling it may be omitted.

Raises:
    InvalidValueError: scaling is not a ScalingMode.)";

constexpr const char* kArgsDoc =
    R"(The arguments of one product: out [m, n] = epilogue(op(lhs) [m, k] @ op(rhs) [k, n]).

torch_overlap.gemm.gemm computes it, and documents dtypes, alignment and errors. Everything is
computed in float32 (float64 for float64 operands) and rounded once. Vectors and matrices of the
epilogue are float32, float16 or bfloat16 (float64 for float64 operands), with unit stride in their
last dimension. Each is optional.

Args:
    lhs: GemmOperand on the left.
    rhs: GemmOperand on the right.
    out: tensor [m, n] that is written, with contiguous rows. It may be a view.
    bias: [n], added to the product.
    gelu: if True, applies GELU (tanh form) after the bias.
    pre_gelu_out: [m, n], receives the input of GELU.
    gelu_input: [m, n]; the product is multiplied by the derivative of GELU at this input. Not with
        bias or gelu.
    bias_grad: receives the gradient of a bias. With gelu_input: [n], the sum of the rows of the
        result without the residual. Otherwise: [m], the sum of op(lhs) over k.
    residual: [m, n], of out's dtype, added after the rest of the epilogue. Not for 8-bit out.
    accumulate: if True, adds to the content of out. Not for 8-bit out.
    use_split_accumulator: if True, partial sums of 8-bit operands on Hopper are promoted to
        float32: slower, more accurate.
    out_scale: one float32, for 8-bit out = value * out_scale.
    out_amax: one float32, receives the largest |value| of an 8-bit out.
    sm_target: number of SMs that the product is planned for; 0 means all.
    workspace: contiguous memory for the library. None selects the cached workspace of the device
        and stream.)";

constexpr const char* kRowsDoc =
    R"(Returns the product of the rows [begin, begin + length) of out.

These are the rows of op(lhs), too. The tensors are views: nothing is copied or computed.

Args:
    begin: the first row.
    length: number of rows.

Raises:
    InvalidValueError: the range is not within out.
    UnsupportedError: the product cannot be cut there: scales that are swizzled, or of 128 x 128
        blocks, anywhere but at multiples of 128; out_amax; bias_grad with gelu_input.
    The errors of torch_overlap.gemm.gemm.)";

constexpr const char* kColumnsDoc =
    R"(Returns the product of the columns [begin, begin + length) of out.

These are the columns of op(rhs) and of the bias, too. The tensors are views: nothing is copied or
computed. Without gelu_input, bias_grad is the same for all columns, and only the product of the
columns that begin at 0 has it.

Args:
    begin: the first column.
    length: number of columns.

Raises:
    The errors of rows(), except that bias_grad with gelu_input is supported.)";

void bind_operand(py::module_& module) {
  py::class_<GemmOperand>(module, "GemmOperand", kOperandDoc)
      .def(py::init(&make_gemm_operand), py::arg("data"), py::arg("transposed") = false,
           py::kw_only(), py::arg("scaling") = 0, py::arg("scale_inv") = py::none(),
           py::arg("swizzled") = false, py::arg("columnwise_data") = py::none(),
           py::arg("columnwise_scale_inv") = py::none())
      .def_readonly("data", &GemmOperand::data,
                    "Tensor [rows, columns] with contiguous rows (stride(1) == 1).")
      .def_readonly("transposed", &GemmOperand::transposed, "True if the product uses data^T.")
      .def_readonly("scaling", &GemmOperand::scaling, "ScalingMode of 8-bit data.")
      .def_readonly("swizzled", &GemmOperand::swizzled,
                    "True if MXFP8 scale_inv is in the swizzled order of the tensor cores.")
      .def_property_readonly("scale_inv", &get_operand_tensor<&GemmOperand::scale_inv>,
                             "Inverse scales of data, or None.")
      .def_property_readonly("columnwise_data", &get_operand_tensor<&GemmOperand::columnwise_data>,
                             "data^T, quantized along its own rows, or None.")
      .def_property_readonly("columnwise_scale_inv",
                             &get_operand_tensor<&GemmOperand::columnwise_scale_inv>,
                             "Inverse scales of columnwise_data, or None.");
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
      .def_readonly("lhs", &GemmArgs::lhs, "GemmOperand on the left.")
      .def_readonly("rhs", &GemmArgs::rhs, "GemmOperand on the right.")
      .def_readonly("out", &GemmArgs::out, "Output tensor, [m, n].")
      .def_property_readonly("bias", &get_epilogue_tensor<&GemmEpilogue::bias>,
                             "Bias that is added to the product, [n], or None.")
      .def_property_readonly(
          "gelu", [](const GemmArgs& args) { return args.epilogue.gelu; },
          "True if GELU (tanh form) is applied after the bias.")
      .def_property_readonly("pre_gelu_out", &get_epilogue_tensor<&GemmEpilogue::pre_gelu_out>,
                             "Receives the input of GELU, [m, n]; or None.")
      .def_property_readonly("gelu_input", &get_epilogue_tensor<&GemmEpilogue::gelu_input>,
                             "Input at which the derivative of GELU is evaluated, [m, n]; or None.")
      .def_property_readonly(
          "bias_grad", &get_epilogue_tensor<&GemmEpilogue::bias_grad>,
          "Receives the gradient of a bias, [n] with gelu_input, otherwise [m]; or None.")
      .def_property_readonly("residual", &get_epilogue_tensor<&GemmEpilogue::residual>,
                             "Matrix that is added after the epilogue, [m, n]; or None.")
      .def_readonly("accumulate", &GemmArgs::accumulate,
                    "True if the result is added to the content of out.")
      .def_readonly("use_split_accumulator", &GemmArgs::use_split_accumulator,
                    "True if partial sums of 8-bit operands are promoted to float32 (Hopper).")
      .def_property_readonly("out_scale", &get_args_tensor<&GemmArgs::out_scale>,
                             "Scale of an 8-bit out, one float32; or None.")
      .def_property_readonly("out_amax", &get_args_tensor<&GemmArgs::out_amax>,
                             "Receives the largest |value| of an 8-bit out, one float32; or None.")
      .def_readonly("sm_target", &GemmArgs::sm_target,
                    "Number of SMs that the product is planned for; 0 means all.")
      .def_property_readonly("workspace", &get_args_tensor<&GemmArgs::workspace>,
                             "Contiguous memory for the library, or None for the cached workspace.")
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
  bind_enum<ScalingMode>(module, "ScalingMode", "enum.IntEnum",
                         "Scaling of the 8-bit values of an operand: value = data * scale_inv.", 7);
  auto own = module.def_submodule("_gemm", "Matrix products; torch_overlap.gemm documents them.");
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
      "custom_gemm_kernels",
      [](const GemmArgs& args) { return custom_gemm_kernels("custom_gemm_kernels", args); },
      py::arg("args"));
  own.def(
      "run_custom_gemm_kernel",
      [](const GemmArgs& args, const std::string& kernel) {
        run_custom_gemm_kernel("run_custom_gemm_kernel", args, kernel);
      },
      py::arg("args"), py::arg("kernel"), py::call_guard<py::gil_scoped_release>());
  own.def("set_gemm_tuning", &set_gemm_tuning, py::arg("tuning"));
  own.def("set_gemm_mxfp8", &set_gemm_mxfp8, py::arg("path"));
  own.def("gemm_statistics", &statistics);
  own.def("reset_gemm_statistics", &reset_gemm_statistics);
}

}  // namespace torch_overlap::python
