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

// The reference for the other backends: everything in fp32 (fp64 for fp64), rounded once.
class CpuGemm final : public GemmBackend {
 public:
  void run(const GemmProblem& problem) override {
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
