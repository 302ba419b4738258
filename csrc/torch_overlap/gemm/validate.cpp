#include "torch_overlap/gemm/validate.h"

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/aliasing.h"
#include "torch_overlap/gemm/operand.h"

namespace torch_overlap {
namespace {

bool is_plain_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_device(std::string_view op, std::string_view name, const at::Tensor& tensor,
                  c10::Device device) {
  TORCH_OVERLAP_CHECK(!tensor.defined() || tensor.device() == device, kType, op, ": expected ",
                      name, " on ", device, ", the device of lhs, got ", tensor.device(),
                      "; move it");
}

void check_devices(std::string_view op, const GemmArgs& args) {
  const auto device = args.lhs.data.device();
  check_device(op, "rhs", args.rhs.data, device);
  check_device(op, "out", args.out, device);
  for (const auto* operand : {&args.lhs, &args.rhs}) {
    check_device(op, "scale_inv", operand->scale_inv, device);
    check_device(op, "columnwise_scale_inv", operand->columnwise_scale_inv, device);
  }
  const GemmEpilogue& epilogue = args.epilogue;
  check_device(op, "bias", epilogue.bias, device);
  check_device(op, "pre_gelu_out", epilogue.pre_gelu_out, device);
  check_device(op, "gelu_input", epilogue.gelu_input, device);
  check_device(op, "bias_grad", epilogue.bias_grad, device);
  check_device(op, "residual", epilogue.residual, device);
  check_device(op, "out_scale", args.out_scale, device);
  check_device(op, "out_amax", args.out_amax, device);
  check_device(op, "workspace", args.workspace, device);
}

void check_pair(std::string_view op, const GemmProblem& problem) {
  const auto lhs = problem.lhs.scaling;
  const auto rhs = problem.rhs.scaling;
  const auto is_block = [](ScalingMode mode) {
    return mode == ScalingMode::BLOCK_1D_SCALING || mode == ScalingMode::BLOCK_2D_SCALING;
  };
  TORCH_OVERLAP_CHECK(lhs == rhs || (is_tensor_scaling(lhs) && is_tensor_scaling(rhs)) ||
                          (is_block(lhs) && is_block(rhs)),
                      kValue, op, ": expected operands of one kind of scaling, got ",
                      to_string(lhs), " for lhs and ", to_string(rhs),
                      " for rhs; quantize both alike");
  TORCH_OVERLAP_CHECK(
      !(lhs == ScalingMode::BLOCK_2D_SCALING && rhs == ScalingMode::BLOCK_2D_SCALING), kUnsupported,
      op,
      ": expected BLOCK_1D_SCALING on one side, got BLOCK_2D_SCALING on both; "
      "quantize the activations in blocks of 1 x 128");
  const auto lhs_type = problem.lhs.data.scalar_type();
  const auto rhs_type = problem.rhs.data.scalar_type();
  if (!problem.lhs.scaled()) {
    TORCH_OVERLAP_CHECK(lhs_type == rhs_type, kType, op,
                        ": expected lhs and rhs of one dtype, got ", lhs_type, " and ", rhs_type,
                        "; convert one of them");
  } else {
    TORCH_OVERLAP_CHECK(lhs_type != at::kFloat8_e5m2 || rhs_type != at::kFloat8_e5m2, kType, op,
                        ": expected float8_e4m3fn on one side, got float8_e5m2 on both; quantize "
                        "what is no gradient to float8_e4m3fn");
  }
}

void check_out(std::string_view op, const GemmProblem& problem) {
  const at::Tensor& out = problem.args.out;
  const auto [m, n, k] = problem.shape;
  TORCH_OVERLAP_CHECK(out.dim() == 2 && out.size(0) == m && out.size(1) == n, kValue, op,
                      ": expected out of shape [", m, ", ", n, "], got ", out.sizes(),
                      " (output buffer size is incorrect); allocate [m, n]");
  TORCH_OVERLAP_CHECK(has_contiguous_rows(out), kValue, op,
                      ": expected out whose rows are contiguous and do not overlap, got strides ",
                      out.strides(), "; pass a row-major view");
  const auto in = problem.lhs.data.scalar_type();
  const auto type = out.scalar_type();
  const bool fits = in == at::kDouble      ? type == at::kDouble
                    : is_8_bit(out)        ? true
                    : problem.lhs.scaled() ? is_plain_float(type)
                                           : type == at::kFloat || type == in;
  TORCH_OVERLAP_CHECK(fits, kType, op, ": expected out of the operands' dtype ", in,
                      in == at::kDouble ? "" : ", a wider or an 8-bit one", ", got ", type,
                      "; convert the result");
}

// Requirements of the 8-bit tensor cores, checked on every device so that code is portable.
void check_8_bit_sizes(std::string_view op, const GemmProblem& problem) {
  const auto [m, n, k] = problem.shape;
  const at::Tensor& out = problem.args.out;
  constexpr int64_t kAlignment = 16;
  TORCH_OVERLAP_CHECK(k % kAlignment == 0, kValue, op, ": expected k to be a multiple of ",
                      kAlignment, " for 8-bit operands, got ", k, "; pad them with zeros");
  TORCH_OVERLAP_CHECK(n * out.element_size() % kAlignment == 0, kValue, op,
                      ": expected rows of out of a multiple of ", kAlignment,
                      " bytes for 8-bit operands, got n = ", n, " of ", out.scalar_type(),
                      "; pad rhs with zeros");
  for (const auto side : {Side::kLhs, Side::kRhs}) {
    const auto& data = side == Side::kLhs ? problem.lhs.data : problem.rhs.data;
    const bool aligned =
        data.numel() == 0 || ((data.size(0) == 1 || data.stride(0) % kAlignment == 0) &&
                              reinterpret_cast<uintptr_t>(data.const_data_ptr()) % kAlignment == 0);
    TORCH_OVERLAP_CHECK(aligned, kValue, op, ": expected 8-bit ", name_of(side),
                        " whose rows begin at multiples of ", kAlignment, " bytes, got strides ",
                        data.strides(), " and offset ", data.storage_offset(), "; copy it");
  }
  if (problem.lhs.scaling == ScalingMode::BLOCK_1D_SCALING ||
      problem.lhs.scaling == ScalingMode::BLOCK_2D_SCALING) {
    const bool m_fits =
        problem.lhs.scaling == ScalingMode::BLOCK_2D_SCALING || m % kBlockScaledMultiple == 0;
    TORCH_OVERLAP_CHECK(m_fits && n % kBlockScaledMultiple == 0, kValue, op,
                        ": expected m and n to be multiples of ", kBlockScaledMultiple,
                        " for block scaling, got ", m, " and ", n, "; pad them with zeros");
  }
}

void check_8_bit_out(std::string_view op, const GemmArgs& args) {
  const bool quantized = is_8_bit(args.out);
  const auto one = [&](std::string_view name, const at::Tensor& tensor) {
    TORCH_OVERLAP_CHECK(quantized, kValue, op, ": expected no ", name, " for out of ",
                        args.out.scalar_type(), ", got one; leave it out");
    TORCH_OVERLAP_CHECK(tensor.scalar_type() == at::kFloat && tensor.numel() == 1, kValue, op,
                        ": expected ", name, " of float32 and one element, got ",
                        tensor.scalar_type(), ' ', tensor.sizes(), "; pass such a tensor");
  };
  TORCH_OVERLAP_CHECK(!quantized || args.out_scale.defined(), kValue, op,
                      ": expected out_scale for 8-bit out, got none; pass the factor that values "
                      "are multiplied with");
  if (args.out_scale.defined()) one("out_scale", args.out_scale);
  if (args.out_amax.defined()) one("out_amax", args.out_amax);
  TORCH_OVERLAP_CHECK(!quantized || !args.accumulate, kUnsupported, op,
                      ": expected no accumulate for 8-bit out, got accumulate; accumulate in "
                      "float32 or bfloat16");
}

void check_extra(std::string_view op, std::string_view name, const at::Tensor& tensor,
                 c10::IntArrayRef sizes, at::ScalarType operands) {
  if (!tensor.defined()) return;
  const auto type = tensor.scalar_type();
  TORCH_OVERLAP_CHECK(operands == at::kDouble ? type == at::kDouble : is_plain_float(type), kType,
                      op, ": expected ", name, " of ",
                      operands == at::kDouble ? "float64" : "float32, float16 or bfloat16",
                      ", got ", type, "; convert it");
  TORCH_OVERLAP_CHECK(tensor.sizes() == sizes, kValue, op, ": expected ", name, " of shape ", sizes,
                      ", got ", tensor.sizes(), "; pass one of that shape");
  const bool fits = tensor.dim() == 1 ? tensor.size(0) <= 1 || tensor.stride(0) == 1
                                      : has_contiguous_rows(tensor);
  TORCH_OVERLAP_CHECK(fits, kValue, op, ": expected ", name,
                      " whose rows are contiguous and do not overlap, got strides ",
                      tensor.strides(), "; use ", name, ".contiguous()");
}

void check_epilogue(std::string_view op, const GemmProblem& problem) {
  const GemmEpilogue& epilogue = problem.args.epilogue;
  const auto [m, n, k] = problem.shape;
  const auto operands = problem.lhs.data.scalar_type();
  const bool dgelu = epilogue.gelu_input.defined();
  TORCH_OVERLAP_CHECK(
      epilogue.gelu || !epilogue.pre_gelu_out.defined(), kValue, op,
      ": expected gelu with pre_gelu_out, got pre_gelu_out alone; pass gelu = true");
  TORCH_OVERLAP_CHECK(!dgelu || !epilogue.gelu, kValue, op,
                      ": expected gelu or gelu_input, got both; one is the forward pass, the other "
                      "the backward pass");
  TORCH_OVERLAP_CHECK(!dgelu || !epilogue.bias.defined(), kValue, op,
                      ": expected bias or gelu_input, got both; the backward pass adds no bias");
  check_extra(op, "bias", epilogue.bias, {n}, operands);
  check_extra(op, "pre_gelu_out", epilogue.pre_gelu_out, {m, n}, operands);
  check_extra(op, "gelu_input", epilogue.gelu_input, {m, n}, operands);
  check_extra(op, "bias_grad", epilogue.bias_grad, {dgelu ? n : m}, operands);
}

void check_residual(std::string_view op, const GemmProblem& problem) {
  const GemmArgs& args = problem.args;
  const at::Tensor& residual = args.epilogue.residual;
  if (!residual.defined()) return;
  const auto [m, n, k] = problem.shape;
  TORCH_OVERLAP_CHECK(!args.accumulate, kValue, op,
                      ": expected residual or accumulate, got both; accumulate is out as residual");
  TORCH_OVERLAP_CHECK(!is_8_bit(args.out), kUnsupported, op,
                      ": expected no residual for 8-bit out, got one; add it in float32 or "
                      "bfloat16");
  TORCH_OVERLAP_CHECK(residual.scalar_type() == args.out.scalar_type(), kType, op,
                      ": expected residual of the dtype of out, ", args.out.scalar_type(), ", got ",
                      residual.scalar_type(), "; convert it");
  check_extra(op, "residual", residual, {m, n}, problem.lhs.data.scalar_type());
}

}  // namespace

GemmProblem checked_problem(std::string_view op, const GemmArgs& args) {
  GemmProblem problem{.op = op,
                      .args = args,
                      .shape = {},
                      .lhs = view_of(op, Side::kLhs, args.lhs),
                      .rhs = view_of(op, Side::kRhs, args.rhs)};
  TORCH_OVERLAP_CHECK(args.out.defined(), kValue, op, ": expected out, got none; allocate [m, n]");
  problem.shape = gemm_shape(args);
  const bool rhs_transposed = args.rhs.transposed;
  const int64_t rhs_k = args.rhs.data.size(rhs_transposed ? 1 : 0);
  TORCH_OVERLAP_CHECK(problem.shape.k == rhs_k, kValue, op, ": expected op(rhs) of ",
                      problem.shape.k, " rows, the columns of op(lhs), got ", rhs_k,
                      "; look at the `transposed` flags of lhs ", args.lhs.data.sizes(),
                      " and rhs ", args.rhs.data.sizes());
  check_devices(op, args);
  check_pair(op, problem);
  check_out(op, problem);
  check_8_bit_out(op, args);
  if (problem.lhs.scaled() && problem.shape.m > 0 && problem.shape.n > 0) {
    check_8_bit_sizes(op, problem);
  }
  check_epilogue(op, problem);
  check_residual(op, problem);
  check_no_aliasing(problem);
  TORCH_OVERLAP_CHECK(args.sm_target >= 0, kValue, op, ": expected sm_target >= 0, got ",
                      args.sm_target, "; 0 is for all SMs");
  TORCH_OVERLAP_CHECK(!args.workspace.defined() || args.workspace.is_contiguous(), kValue, op,
                      ": expected a contiguous workspace, got strides ", args.workspace.strides(),
                      "; pass a flat tensor of bytes");
  return problem;
}

}  // namespace torch_overlap
