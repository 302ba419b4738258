#include "torch_overlap/gemm/cublaslt/epilogue.h"

#include "torch_overlap/gemm/cublaslt/key.h"

// For supported type combinations, see the tables under cublasLtMatmul() in the cuBLAS
// documentation.
namespace torch_overlap::cublaslt {
namespace {

// Requirements on the rows and the address of a matrix of pre-activations.
constexpr int64_t kAuxMultiple = 8;    // elements
constexpr int64_t kAuxAlignment = 16;  // bytes

// Bits of cublasLtEpilogue_t.
constexpr int kBias = CUBLASLT_EPILOGUE_BIAS;
constexpr int kGelu = CUBLASLT_EPILOGUE_GELU;
constexpr int kAux = CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU;

bool supports_out_type(const GemmProblem& problem) {
  const at::Tensor& out = problem.args.out;
  const auto lhs = problem.lhs.data.scalar_type();
  const auto rhs = problem.rhs.data.scalar_type();
  if (!is_8_bit(out)) {
    return problem.lhs.scaled() || out.scalar_type() == lhs || out.scalar_type() == at::kFloat;
  }
  if (!is_tensor_scaling(problem.lhs.scaling)) return false;
  return lhs != rhs || out.scalar_type() == at::kFloat8_e4m3fn;
}

bool supports_bias_type(const GemmProblem& problem, const at::Tensor& bias) {
  const at::Tensor& out = problem.args.out;
  const auto type = bias.scalar_type();
  if (is_8_bit(out)) return type == at::kBFloat16 || type == at::kHalf;
  if (problem.lhs.scaled() && out.scalar_type() == at::kFloat) return type == at::kBFloat16;
  return type == out.scalar_type();
}

bool supports_aux(const GemmProblem& problem, const at::Tensor& aux) {
  const int64_t leading = aux.size(0) <= 1 ? aux.size(1) : aux.stride(0);
  return aux.scalar_type() == problem.args.out.scalar_type() && leading % kAuxMultiple == 0 &&
         alignment_of(aux.const_data_ptr()) >= kAuxAlignment;
}

}  // namespace

std::optional<cublasLtEpilogue_t> fused_epilogue(const GemmProblem& problem) {
  const GemmEpilogue& asked = problem.args.epilogue;
  if (!supports_out_type(problem)) return std::nullopt;
  if (residual_of(problem.args).defined() &&
      (asked.gelu_input.defined() || asked.pre_gelu_out.defined())) {
    return std::nullopt;
  }
  if (asked.gelu_input.defined()) {
    if (!supports_aux(problem, asked.gelu_input)) return std::nullopt;
    if (!asked.bias_grad.defined()) return CUBLASLT_EPILOGUE_DGELU;
    if (asked.bias_grad.scalar_type() != problem.args.out.scalar_type()) return std::nullopt;
    return CUBLASLT_EPILOGUE_DGELU_BGRAD;
  }
  int bits = 0;
  if (asked.bias.defined()) {
    if (!supports_bias_type(problem, asked.bias)) return std::nullopt;
    bits |= kBias;
  }
  if (asked.gelu) bits |= kGelu;
  if (asked.pre_gelu_out.defined()) {
    if (!supports_aux(problem, asked.pre_gelu_out)) return std::nullopt;
    bits |= kAux;
  }
  return bits == 0 ? CUBLASLT_EPILOGUE_DEFAULT : static_cast<cublasLtEpilogue_t>(bits);
}

bool has_bias_grad_over_k(const GemmProblem& problem) {
  const GemmEpilogue& asked = problem.args.epilogue;
  return asked.bias_grad.defined() && !asked.gelu_input.defined();
}

bool can_fuse_bias_grad_over_k(const GemmProblem& problem) {
  const GemmEpilogue& asked = problem.args.epilogue;
  const auto out = problem.args.out.scalar_type();
  return has_bias_grad_over_k(problem) && !problem.lhs.scaled() && !asked.bias.defined() &&
         !asked.gelu && asked.bias_grad.scalar_type() == out &&
         out == problem.lhs.data.scalar_type();
}

at::Tensor bias_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue) {
  switch (epilogue) {
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      return asked.bias;
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADB:
      return asked.bias_grad;
    default:
      return {};
  }
}

at::Tensor aux_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue) {
  switch (epilogue) {
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      return asked.pre_gelu_out;
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
      return asked.gelu_input;
    default:
      return {};
  }
}

}  // namespace torch_overlap::cublaslt
