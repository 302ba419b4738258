#include "torch_overlap/gemm/backend.h"

#include <ATen/ops/mm.h>

#include "torch_overlap/gemm/epilogue.h"

namespace torch_overlap {
namespace {

at::Tensor wide(std::string_view op, const OperandView& operand) {
  if (operand.scaled()) return dequantize(op, operand, at::kFloat);
  const auto type = operand.data.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return operand.data.to(type);
}

at::Tensor matrix_of(const OperandView& operand) {
  return operand.transposed ? operand.data.t() : operand.data;
}

// True if the product itself is the result, in the dtype in which it is computed.
bool is_plain(const GemmArgs& args) {
  const GemmEpilogue& epilogue = args.epilogue;
  const auto dtype = args.out.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && args.lhs.data.scalar_type() == dtype &&
         args.rhs.data.scalar_type() == dtype && !args.accumulate && !epilogue.bias.defined() &&
         !epilogue.gelu && !epilogue.gelu_input.defined() && !epilogue.bias_grad.defined() &&
         !epilogue.residual.defined() && !args.out_scale.defined() && !args.out_amax.defined();
}

// The reference for the other backends: everything in fp32 (fp64 for fp64), rounded once.
class CpuGemm final : public GemmBackend {
 public:
  void run(const GemmProblem& problem) override {
    if (is_plain(problem.args)) {
      at::Tensor out = problem.args.out;
      at::mm_out(out, matrix_of(problem.lhs), matrix_of(problem.rhs));
      return;
    }
    const auto lhs = wide(problem.op, problem.lhs);
    const auto rhs = wide(problem.op, problem.rhs);
    compute_unfused_bias_grad(problem);
    apply_unfused_epilogue(problem, at::mm(problem.lhs.transposed ? lhs.t() : lhs,
                                           problem.rhs.transposed ? rhs.t() : rhs));
  }
};

const GemmBackendRegistration cpu_gemm(c10::DeviceType::CPU, std::make_shared<CpuGemm>());

}  // namespace
}  // namespace torch_overlap
