#include "torch_overlap/gemm/cublaslt/key.h"

#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <bit>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/cublaslt/epilogue.h"
#include "torch_overlap/gemm/cublaslt/scales.h"

namespace torch_overlap::cublaslt {
namespace {

// Returns the leading dimension of a row-major matrix. The stride of a single row is ignored.
int64_t leading_dimension(const at::Tensor& matrix) {
  const int64_t row = std::max<int64_t>(matrix.size(1), 1);
  return matrix.size(0) <= 1 ? row : matrix.stride(0);
}

cublasComputeType_t compute_type(at::ScalarType operands) {
  if (operands != at::kFloat) return CUBLAS_COMPUTE_32F;
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                 : CUBLAS_COMPUTE_32F;
}

// Returns the reduction schemes that torch's switches for reduced-precision reductions allow.
int64_t allowed_reduction_schemes(at::ScalarType operands) {
  const auto& context = at::globalContext();
  auto option = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  if (operands == at::kHalf) option = context.allowFP16ReductionCuBLAS();
  if (operands == at::kBFloat16) option = context.allowBF16ReductionCuBLAS();
  switch (option) {
    case at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK:
      return CUBLASLT_REDUCTION_SCHEME_MASK;
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    default:
      return CUBLASLT_REDUCTION_SCHEME_NONE;
  }
}

}  // namespace

size_t PlanKeyHash::operator()(const PlanKey& key) const noexcept {
  const auto words = std::bit_cast<std::array<uint64_t, sizeof(PlanKey) / sizeof(uint64_t)>>(key);
  uint64_t hash = 0;
  for (const uint64_t word : words) {
    hash = std::rotl((hash ^ word) * 0x9E3779B97F4A7C15U, 29);
  }
  return static_cast<size_t>(hash ^ (hash >> 32U));
}

cudaDataType_t cuda_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return CUDA_R_32F;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kFloat8_e4m3fn:
      return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2:
      return CUDA_R_8F_E5M2;
    default:
      fail(ErrorKind::kType, "gemm: expected a dtype that cuBLASLt multiplies, got ", type);
  }
}

int64_t alignment_of(const void* pointer) {
  constexpr uintptr_t kMaxAlignmentBytes = 256;
  const auto address = reinterpret_cast<uintptr_t>(pointer) | kMaxAlignmentBytes;
  return static_cast<int64_t>(address & (~address + 1));
}

LtMatmulArgs make_matmul_args(const GemmProblem& problem, cublasLtEpilogue_t epilogue,
                              const at::Tensor& out, const Workspace& workspace) {
  const GemmArgs& args = problem.args;
  const OperandView& a = problem.rhs;
  const OperandView& b = problem.lhs;
  const bool is_result = out.is_same(args.out);
  LtMatmulArgs call;
  call.a = a.data.const_data_ptr();
  call.b = b.data.const_data_ptr();
  call.d = out.data_ptr();
  const at::Tensor vector = bias_of(args.epilogue, epilogue);
  const at::Tensor aux = aux_of(args.epilogue, epilogue);
  if (vector.defined()) call.bias = vector.data_ptr();
  if (aux.defined()) call.aux = aux.data_ptr();
  const at::Tensor residual = is_result ? residual_of(args) : at::Tensor();
  if (residual.defined()) call.c = residual.const_data_ptr();
  if (a.scaled()) {
    call.owned_scale_a = scales_in_cublaslt_layout(problem.op, a);
    call.owned_scale_b = scales_in_cublaslt_layout(problem.op, b);
    call.scale_a = call.owned_scale_a.const_data_ptr();
    call.scale_b = call.owned_scale_b.const_data_ptr();
  }
  const bool quantized = is_8_bit(out);
  if (quantized) {
    call.scale_d = args.out_scale.const_data_ptr();
    if (args.out_amax.defined()) call.amax_d = args.out_amax.data_ptr();
  }
  // If nothing is added, C is D; for an 8-bit D it is a matrix of the bias' type, which is not
  // read.
  const auto c_type = !quantized         ? out.scalar_type()
                      : vector.defined() ? vector.scalar_type()
                                         : at::kBFloat16;
  call.key = {
      .m = problem.shape.n,
      .n = problem.shape.m,
      .k = problem.shape.k,
      .lda = leading_dimension(a.data),
      .ldb = leading_dimension(b.data),
      .ldc = leading_dimension(residual.defined() ? residual : out),
      .ldd = leading_dimension(out),
      .ld_aux = aux.defined() ? leading_dimension(aux) : 0,
      .type_a = cuda_type(a.data.scalar_type()),
      .type_b = cuda_type(b.data.scalar_type()),
      .type_c = cuda_type(c_type),
      .type_d = cuda_type(out.scalar_type()),
      .type_bias = vector.defined() ? cuda_type(vector.scalar_type()) : -1,
      .type_aux = aux.defined() ? cuda_type(aux.scalar_type()) : -1,
      .transpose_a = a.transposed,
      .transpose_b = b.transposed,
      .compute = compute_type(b.data.scalar_type()),
      .epilogue = epilogue,
      .scale_mode_a = scale_mode_of(a.scaling),
      .scale_mode_b = scale_mode_of(b.scaling),
      .quantized_out = quantized,
      .has_amax = call.amax_d != nullptr,
      .has_c = residual.defined(),
      .fast_accumulation = supports_fast_accumulation(b.scaling) && !args.use_split_accumulator,
      .reduction_schemes = allowed_reduction_schemes(b.data.scalar_type()),
      .sm_target = args.sm_target,
      .overlaps_communication = args.overlaps_communication,
      .workspace = workspace.bytes,
      .align_a = alignment_of(call.a),
      .align_b = alignment_of(call.b),
      .align_c = call.c != nullptr ? alignment_of(call.c) : 0,
      .align_d = alignment_of(call.d),
      .align_bias = call.bias != nullptr ? alignment_of(call.bias) : 0,
      .align_aux = call.aux != nullptr ? alignment_of(call.aux) : 0,
      .device = out.get_device(),
  };
  return call;
}

}  // namespace torch_overlap::cublaslt
