#include "torch_overlap/gemm/cublaslt/custom_kernel.h"

#include <cublasLt.h>

#include <optional>

#include "torch_overlap/gemm/sm90/types.h"

namespace torch_overlap::cublaslt {
namespace {

std::optional<at::ScalarType> torch_type(int64_t type) {
  for (const auto one : {at::kBFloat16, at::kHalf, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    if (cuda_type(one) == type) return one;
  }
  return std::nullopt;
}

bool is_scaled_by_row(const PlanKey& key) {
  return key.scale_mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F &&
         key.scale_mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
}

// True if the scaling is supported. 8-bit operands: tensor scaling or one scale per row, fast
// accumulation, both operands K-major.
bool has_supported_scaling(const PlanKey& key, at::ScalarType lhs) {
  if (!sm90::is_8_bit(lhs)) return key.scale_mode_a == -1 && key.scale_mode_b == -1;
  const bool is_per_tensor = key.scale_mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F &&
                             key.scale_mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  return (is_per_tensor || is_scaled_by_row(key)) && key.fast_accumulation != 0 &&
         key.transpose_a != 0 && key.transpose_b == 0;
}

}  // namespace

std::optional<sm90::Problem> custom_kernel_problem(const LtMatmulArgs& call, void* d) {
  const PlanKey& key = call.key;
  const auto lhs = torch_type(key.type_b);  // row-major again: see PlanKey
  const auto rhs = torch_type(key.type_a);
  const auto out = torch_type(key.type_d);
  const bool has_bias =
      key.epilogue == CUBLASLT_EPILOGUE_BIAS || key.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  const bool has_gelu =
      key.epilogue == CUBLASLT_EPILOGUE_GELU || key.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  if (!lhs || !rhs || !out || !sm90::supports_types(*lhs, *rhs, *out) ||
      !has_supported_scaling(key, *lhs) || key.quantized_out != 0 || key.sm_target != 0 ||
      (!has_bias && !has_gelu && key.epilogue != CUBLASLT_EPILOGUE_DEFAULT)) {
    return std::nullopt;
  }
  const auto bias_type = key.type_bias == CUDA_R_16BF  ? sm90::ElementType::bf16
                         : key.type_bias == CUDA_R_16F ? sm90::ElementType::f16
                                                       : sm90::ElementType::f32;
  return sm90::Problem{.lhs_type = *lhs,
                       .rhs_type = *rhs,
                       .out_type = *out,
                       .m = key.n,
                       .n = key.m,
                       .k = key.k,
                       .lhs = call.b,
                       .lhs_stride = key.ldb,
                       .is_lhs_k_major = key.transpose_b == 0,
                       .rhs = call.a,
                       .rhs_stride = key.lda,
                       .is_rhs_k_major = key.transpose_a != 0,
                       .lhs_scale = static_cast<const float*>(call.scale_b),
                       .rhs_scale = static_cast<const float*>(call.scale_a),
                       .scaled_by_row = is_scaled_by_row(key),
                       .out = d,
                       .out_stride = key.ldd,
                       .bias = has_bias ? call.bias : nullptr,
                       .bias_type = has_bias ? bias_type : sm90::ElementType::none,
                       .gelu = has_gelu,
                       .residual = call.c,
                       .residual_stride = key.ldc};
}

}  // namespace torch_overlap::cublaslt
