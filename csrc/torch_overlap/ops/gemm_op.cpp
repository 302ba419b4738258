#include "torch_overlap/ops/gemm_op.h"

#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/checks.h"

namespace torch_overlap::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool is_high_precision(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

bool is_eight_bit(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

c10::SymInt product(c10::SymIntArrayRef sizes) {
  c10::SymInt result = 1;
  for (const auto& size : sizes) result *= size;
  return result;
}

void check_operand(std::string_view op, std::string_view what, const Tensor& operand,
                   const OptionalTensor& scale_inv, const OptionalTensor& swizzle, ScalingMode mode,
                   bool scales_swizzled) {
  if (mode == ScalingMode::NO_SCALING) {
    TORCH_OVERLAP_CHECK(is_high_precision(operand.scalar_type()), kType, op, ": expected ", what,
                        " of dtype float32, float16, bfloat16 or float64 for NO_SCALING, got ",
                        operand.scalar_type(), "; pass a scaling_mode and scales for 8-bit values");
    TORCH_OVERLAP_CHECK(!scale_inv, kValue, op, ": expected no ", what,
                        "_scale_inv for NO_SCALING, got one; pass a scaling_mode");
  } else {
    TORCH_OVERLAP_CHECK(is_eight_bit(operand.scalar_type()), kType, op, ": expected ", what,
                        " of dtype float8_e4m3fn or float8_e5m2 for ", to_string(mode), ", got ",
                        operand.scalar_type(), "; use torch_overlap.ops.quantize");
    TORCH_OVERLAP_CHECK(scale_inv, kValue, op, ": expected ", what, "_scale_inv for ",
                        to_string(mode),
                        ", got none (Missing inverse scaling factor). Pass what "
                        "quantize gave.");
  }
  TORCH_OVERLAP_CHECK(!swizzle || (mode == ScalingMode::MXFP8_1D_SCALING && !scales_swizzled),
                      kValue, op, ": expected no ", what, "_swizzle for ", to_string(mode),
                      scales_swizzled ? " with scales_swizzled" : "",
                      ", got one. It is where MXFP8 scales that are not swizzled go.");
  if (!swizzle) return;
  TORCH_OVERLAP_CHECK(
      (swizzle->scalar_type() == at::kFloat8_e8m0fnu || swizzle->scalar_type() == at::kByte) &&
          swizzle->device() == operand.device(),
      kType, op, ": expected ", what, "_swizzle of dtype float8_e8m0fnu or uint8 on ",
      operand.device(), ", got ", swizzle->scalar_type(), " on ", swizzle->device(),
      ". Allocate it so.");
  TORCH_OVERLAP_CHECK(swizzle->is_contiguous(), kValue, op, ": expected ", what,
                      "_swizzle contiguous, got strides ", swizzle->sym_strides(),
                      ". Allocate it so.");
  const auto padded = empty_swizzled(op, *scale_inv).sym_numel();
  const auto is_there = swizzle->sym_numel().sym_ne(0).sym_or(padded.sym_eq(0));
  TORCH_OVERLAP_CHECK(is_there.expect_true(__FILE__, __LINE__), kValue, op,
                      ": Missing swizzled inverse scale buffer: expected ", what, "_swizzle of ",
                      padded, " elements, got an empty one; leave it out, or pass one");
  check_size(op, concat(what, "_swizzle of as many elements as the padded scales,"), padded,
             swizzle->sym_numel());
}

void check_same_device(std::string_view op, std::string_view what, const OptionalTensor& tensor,
                       const Tensor& lhs) {
  TORCH_OVERLAP_CHECK(!tensor || tensor->device() == lhs.device(), kType, op, ": expected ", what,
                      " on ", lhs.device(), " as lhs, got it on ",
                      tensor ? tensor->device() : lhs.device(), "; move one of them");
}

void check_epilogue_operands(std::string_view op, const GemmOp& call) {
  check_same_device(op, "rhs", call.rhs, call.lhs);
  check_same_device(op, "lhs_scale_inv", call.lhs_scale_inv, call.lhs);
  check_same_device(op, "rhs_scale_inv", call.rhs_scale_inv, call.lhs);
  check_same_device(op, "bias", call.bias, call.lhs);
  check_same_device(op, "gelu_input", call.gelu_input, call.lhs);
  check_same_device(op, "workspace", call.workspace, call.lhs);
  check_same_device(op, "out_scale", call.out_scale, call.lhs);
  check_same_device(op, "out_amax", call.out_amax, call.lhs);
  TORCH_OVERLAP_CHECK(call.fuse_bias || !call.bias, kValue, op,
                      ": expected fuse_bias where a bias is given, got False. Pass fuse_bias=True, "
                      "or no bias.");
  TORCH_OVERLAP_CHECK(!call.fuse_bias || call.grad || call.bias, kValue, op,
                      ": expected a bias for fuse_bias, got none. Pass one, or fuse_bias=False.");
  const bool reads_gelu_input = call.fuse_gelu && call.grad;
  TORCH_OVERLAP_CHECK(!reads_gelu_input || call.gelu_input, kValue, op,
                      ": expected gelu_input for fuse_gelu with grad, got none. Pass the "
                      "pre_gelu_out of the forward call.");
  TORCH_OVERLAP_CHECK(reads_gelu_input || !call.gelu_input, kValue, op,
                      ": expected fuse_gelu and grad where gelu_input is given, got fuse_gelu ",
                      call.fuse_gelu, " and grad ", call.grad,
                      ". The forward pass makes pre_gelu_out, and reads no gelu_input.");
  if (call.comm_type != 0) return;
  TORCH_OVERLAP_CHECK(!call.aux_in, kValue, op,
                      ": expected no aux_in for comm_type NONE (0), got one. It is what the "
                      "collective of a BULK buffer takes.");
  TORCH_OVERLAP_CHECK(call.comm_overlap_method == 0, kValue, op,
                      ": expected comm_overlap_method NONE (0) for comm_type NONE (0), got ",
                      call.comm_overlap_method, "; pass comm_type and comm_overlap_id too");
  TORCH_OVERLAP_CHECK(call.comm_overlap_id == 0, kValue, op,
                      ": expected no comm_overlap_id for comm_type NONE (0), got ",
                      call.comm_overlap_id, "; pass comm_type and comm_overlap_method too");
}

void check_out_dtype(std::string_view op, at::ScalarType in, ScalingMode mode, at::ScalarType out) {
  const bool eight_bit_or_float = is_eight_bit(out) || out == at::kFloat;
  if (in == at::kDouble) {
    TORCH_OVERLAP_CHECK(out == in, kType, op, ": expected out_dtype float64 as lhs, got ", out,
                        "; convert the result");
  } else if (mode == ScalingMode::NO_SCALING) {
    TORCH_OVERLAP_CHECK(out == in || eight_bit_or_float, kType, op, ": expected out_dtype ", in,
                        " as lhs, float32 or an 8-bit float, got ", out, "; convert the result");
  } else {
    TORCH_OVERLAP_CHECK(out == at::kHalf || out == at::kBFloat16 || eight_bit_or_float, kType, op,
                        ": expected out_dtype float32, float16, bfloat16 or an 8-bit float, got ",
                        out, "; convert the result");
  }
}

at::ScalarType high_precision_dtype(const GemmOp& call) {
  if (is_high_precision(call.lhs.scalar_type())) return call.lhs.scalar_type();
  if (call.bias) return call.bias->scalar_type();
  return call.gelu_input ? call.gelu_input->scalar_type() : at::kBFloat16;
}

// Returns a matrix of contiguous rows with canonical strides, also for dimensions whose stride is
// irrelevant.
Tensor with_dense_strides(const Tensor& matrix) {
  const bool is_one_row = matrix.size(0) == 1 || matrix.numel() == 0;
  const int64_t row = is_one_row ? std::max<int64_t>(matrix.size(1), 1) : matrix.stride(0);
  if (matrix.stride(0) == row && matrix.stride(1) == 1) return matrix;
  return matrix.as_strided(matrix.sizes(), {row, 1});
}

OptionalTensor as_vector(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->reshape({-1}).contiguous()) : std::nullopt;
}

// Swizzles the scales into the caller's buffer.
void swizzle_into(const Tensor& buffer, GemmOperand& operand) {
  const auto swizzled = swizzle_scales("gemm", operand.scale_inv);
  operand.scale_inv = buffer.view(at::kByte).view(swizzled.sizes()).copy_(swizzled.view(at::kByte));
  operand.swizzled = true;
}

Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }

// Returns an operand for the GEMM layer. Does not copy if the rows are contiguous, or without block
// scales if the columns are.
GemmOperand gemm_operand(const Tensor& matrix, bool transposed, ScalingMode scaling,
                         const OptionalTensor& scale_inv, bool swizzled) {
  GemmOperand operand;
  operand.scaling = scaling;
  operand.scale_inv = or_undefined(scale_inv);
  operand.swizzled = swizzled && scaling == ScalingMode::MXFP8_1D_SCALING;
  const bool any_layout = scaling == ScalingMode::NO_SCALING || is_tensor_scaling(scaling);
  if (has_contiguous_rows(matrix)) {
    operand.data = with_dense_strides(matrix);
    operand.transposed = transposed;
  } else if (any_layout && has_contiguous_rows(matrix.t())) {
    operand.data = with_dense_strides(matrix.t());
    operand.transposed = !transposed;
  } else {
    operand.data = matrix.contiguous();
    operand.transposed = transposed;
  }
  return operand;
}

}  // namespace

CollapsedOperand collapse(std::string_view op, std::string_view what, const Tensor& tensor,
                          int64_t boundary) {
  const int64_t dim = tensor.dim();
  TORCH_OVERLAP_CHECK(dim > 0, kValue, op, ": expected ", what,
                      " of one or more dimensions, got a scalar. Use reshape(1).");
  TORCH_OVERLAP_CHECK(boundary >= -dim && boundary <= dim, kValue, op, ": expected ", what,
                      "_axis_boundary in [", -dim, ", ", dim, "], got ", boundary, " for shape ",
                      tensor.sym_sizes(), ". Dimensions before it are rows.");
  if (boundary < 0) boundary += dim;
  const auto sizes = tensor.sym_sizes();
  return {boundary, product(sizes.slice(0, boundary)), product(sizes.slice(boundary))};
}

GemmResultShape gemm_result_shape(const GemmOp& call, std::string_view op) {
  const auto mode = scaling_mode(op, call.scaling_mode);
  check_operand(op, "lhs", call.lhs, call.lhs_scale_inv, call.lhs_swizzle, mode,
                call.scales_swizzled);
  check_operand(op, "rhs", call.rhs, call.rhs_scale_inv, call.rhs_swizzle, mode,
                call.scales_swizzled);
  TORCH_OVERLAP_CHECK(
      mode != ScalingMode::NO_SCALING || call.lhs.scalar_type() == call.rhs.scalar_type(), kType,
      op, ": expected rhs of dtype ", call.lhs.scalar_type(), " as lhs, got ",
      call.rhs.scalar_type(), "; convert one of them");
  check_epilogue_operands(op, call);

  const auto lhs = collapse(op, "lhs", call.lhs, call.lhs_axis_boundary);
  const auto rhs = collapse(op, "rhs", call.rhs, call.rhs_axis_boundary);
  const auto& m = call.lhs_transposed ? lhs.cols : lhs.rows;
  const auto& n = call.rhs_transposed ? rhs.rows : rhs.cols;
  const auto& lhs_k = call.lhs_transposed ? lhs.rows : lhs.cols;
  const auto& rhs_k = call.rhs_transposed ? rhs.cols : rhs.rows;
  TORCH_OVERLAP_CHECK(lhs_k.sym_eq(rhs_k).expect_true(__FILE__, __LINE__), kValue, op,
                      ": expected as many contracted elements in rhs as in lhs, ", lhs_k, ", got ",
                      rhs_k, " in shape ", call.rhs.sym_sizes(), " for lhs of shape ",
                      call.lhs.sym_sizes(), " with lhs_transposed ", call.lhs_transposed,
                      " and rhs_transposed ", call.rhs_transposed,
                      ". Look at these flags and at the axis boundaries.");
  if (call.fuse_bias && !call.grad) {
    check_size(op, "as many bias entries as columns of the output,", n, call.bias->sym_numel());
  }
  if (call.fuse_bias && call.grad && call.bias) {
    check_size(op, "as many bias entries as bias_grad has (Missing operand-output aliasing),",
               call.fuse_gelu ? n : m, call.bias->sym_numel());
  }
  if (call.gelu_input) {
    check_size(op,
               "as many elements of gelu_input as of the output (Missing operand-output aliasing),",
               m * n, call.gelu_input->sym_numel());
  }

  const auto kept = [](const Tensor& tensor, const CollapsedOperand& operand, bool leading) {
    const auto sizes = tensor.sym_sizes();
    return (leading ? sizes.slice(0, operand.boundary) : sizes.slice(operand.boundary)).vec();
  };
  auto sizes = kept(call.lhs, lhs, !call.lhs_transposed);
  const auto columns = kept(call.rhs, rhs, call.rhs_transposed);
  sizes.insert(sizes.end(), columns.begin(), columns.end());

  const auto wide = high_precision_dtype(call);
  const auto dtype = call.out_dtype.value_or(wide);
  check_out_dtype(op, call.lhs.scalar_type(), mode, dtype);
  return {m, n, std::move(sizes), dtype, is_eight_bit(dtype) ? wide : dtype};
}

Tensor gemm_result(const GemmOp& call, size_t index, c10::SymIntArrayRef sizes,
                   const at::TensorOptions& options, std::string_view op) {
  if (call.into == nullptr) return at::empty_symint(sizes, options);
  constexpr std::array<const char*, 4> kNames{"output", "bias_grad", "pre_gelu_out", "aux_out"};
  const std::array<const Tensor*, 4> given{&std::get<0>(*call.into), &std::get<1>(*call.into),
                                           &std::get<2>(*call.into), &std::get<3>(*call.into)};
  return result_memory(op, kNames.at(index), given.at(index), sizes, options);
}

GemmResults empty_gemm_results(const GemmOp& call, std::string_view op) {
  const auto [m, n, sizes, dtype, saved_dtype] = gemm_result_shape(call, op);
  const auto on = at::TensorOptions().device(call.lhs.device());
  const bool has_bias_grad = call.fuse_bias && call.grad;
  const bool has_pre_gelu = call.fuse_gelu && !call.grad;
  const auto saved = on.dtype(saved_dtype);
  const std::vector<c10::SymInt> none{0};
  const std::vector<c10::SymInt> entries{call.fuse_gelu ? n : m};
  return {gemm_result(call, 0, sizes, on.dtype(dtype), op),
          has_bias_grad
              ? gemm_result(call, 1, entries,
                            on.dtype(call.bias ? call.bias->scalar_type() : saved_dtype), op)
              : at::empty({0}, saved),
          gemm_result(call, 2, has_pre_gelu ? c10::SymIntArrayRef(sizes) : none, saved, op),
          at::empty({0}, saved)};
}

GemmArgs gemm_args(const GemmOp& call, const GemmResults& results, std::string_view op) {
  const auto& [output, bias_grad, pre_gelu_out, aux_out] = results;
  const auto mode = scaling_mode(op, call.scaling_mode);
  const auto matrix = [&](std::string_view what, const Tensor& tensor, int64_t boundary) {
    const auto sizes = collapse(op, what, tensor, boundary);
    return tensor.reshape_symint({sizes.rows, sizes.cols});
  };
  GemmArgs args;
  // The mode is that of the weights, on the right: two operands with 128 x 128 blocks cannot be
  // multiplied.
  const auto lhs_mode =
      mode == ScalingMode::BLOCK_2D_SCALING ? ScalingMode::BLOCK_1D_SCALING : mode;
  args.lhs = gemm_operand(matrix("lhs", call.lhs, call.lhs_axis_boundary), call.lhs_transposed,
                          lhs_mode, call.lhs_scale_inv, call.scales_swizzled);
  args.rhs = gemm_operand(matrix("rhs", call.rhs, call.rhs_axis_boundary), call.rhs_transposed,
                          mode, call.rhs_scale_inv, call.scales_swizzled);
  const int64_t m = args.lhs.data.size(args.lhs.transposed ? 1 : 0);
  const int64_t n = args.rhs.data.size(args.rhs.transposed ? 0 : 1);
  args.out = output.view({m, n});
  if (call.grad) {
    if (call.fuse_bias) args.epilogue.bias_grad = bias_grad;
    if (call.fuse_gelu) {
      args.epilogue.gelu_input = with_dense_strides(call.gelu_input->reshape({m, n}).contiguous());
    }
  } else {
    if (call.fuse_bias) args.epilogue.bias = *as_vector(call.bias);
    args.epilogue.gelu = call.fuse_gelu;
    if (call.fuse_gelu) args.epilogue.pre_gelu_out = pre_gelu_out.view({m, n});
  }
  args.use_split_accumulator = call.use_split_accumulator;
  args.out_scale = or_undefined(call.out_scale);
  args.out_amax = or_undefined(call.out_amax);
  args.workspace = or_undefined(call.workspace);
  return args;
}

void swizzle_operands(const GemmOp& call, GemmArgs& args) {
  if (call.lhs_swizzle) swizzle_into(*call.lhs_swizzle, args.lhs);
  if (call.rhs_swizzle) swizzle_into(*call.rhs_swizzle, args.rhs);
}

}  // namespace torch_overlap::ops
