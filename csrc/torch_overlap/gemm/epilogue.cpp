#include "torch_overlap/gemm/epilogue.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>

namespace torch_overlap {
namespace {

constexpr std::string_view kTanh = "tanh";

double max_fp8_value_of(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn ? 448. : 57344.;
}

void store_8_bit(const GemmArgs& args, const at::Tensor& value) {
  if (args.out_amax.defined() && value.numel() == 0) {
    args.out_amax.zero_();
  } else if (args.out_amax.defined()) {
    args.out_amax.squeeze().copy_(value.abs().amax());
  }
  const double largest = max_fp8_value_of(args.out.scalar_type());
  args.out.copy_(value.mul(args.out_scale.squeeze()).clamp_(-largest, largest));
}

}  // namespace

void apply_unfused_epilogue(const GemmProblem& problem, at::Tensor product) {
  const GemmArgs& args = problem.args;
  const GemmEpilogue& epilogue = args.epilogue;
  at::Tensor value = std::move(product);
  if (epilogue.bias.defined()) value.add_(epilogue.bias);
  if (epilogue.pre_gelu_out.defined()) epilogue.pre_gelu_out.copy_(value);
  if (epilogue.gelu) value = at::gelu(value, kTanh);
  if (epilogue.gelu_input.defined()) {
    value = at::gelu_backward(value, epilogue.gelu_input.to(value.scalar_type()), kTanh);
    if (epilogue.bias_grad.defined()) epilogue.bias_grad.copy_(value.sum(0));
  }
  if (is_8_bit(args.out)) {
    store_8_bit(args, value);
  } else if (residual_of(args).defined()) {
    args.out.copy_(value.add_(residual_of(args)));
  } else {
    args.out.copy_(value);
  }
}

void compute_unfused_bias_grad(const GemmProblem& problem) {
  const at::Tensor& bias_grad = problem.args.epilogue.bias_grad;
  if (!bias_grad.defined() || problem.args.epilogue.gelu_input.defined()) return;
  const auto sum_type = bias_grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor lhs =
      problem.lhs.scaled() ? dequantize(problem.op, problem.lhs, at::kFloat) : problem.lhs.data;
  bias_grad.copy_(lhs.sum({problem.lhs.transposed ? 0 : 1}, /*keepdim=*/false, sum_type));
}

}  // namespace torch_overlap
