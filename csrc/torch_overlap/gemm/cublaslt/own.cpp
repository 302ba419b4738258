#include "torch_overlap/gemm/cublaslt/own.h"

#include <cublasLt.h>

namespace torch_overlap::cublaslt {

std::optional<sm90::Product> own_product(const LtCall& call, void* d) {
  const PlanKey& key = call.key;
  const bool is_16_bit = key.type_a == CUDA_R_16BF || key.type_a == CUDA_R_16F;
  const bool has_bias =
      key.epilogue == CUBLASLT_EPILOGUE_BIAS || key.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  const bool has_gelu =
      key.epilogue == CUBLASLT_EPILOGUE_GELU || key.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  if (!is_16_bit || key.type_b != key.type_a || key.type_d != key.type_a || key.transpose_b != 0 ||
      key.accumulate != 0 || key.quantized_out != 0 || key.sm_target != 0 ||
      (!has_bias && !has_gelu && key.epilogue != CUBLASLT_EPILOGUE_DEFAULT)) {
    return std::nullopt;
  }
  const auto bias_type = key.type_bias == CUDA_R_16BF  ? sm90::VectorType::bf16
                         : key.type_bias == CUDA_R_16F ? sm90::VectorType::f16
                                                       : sm90::VectorType::f32;
  // Row-major once more: see PlanKey.
  return sm90::Product{.dtype = key.type_a == CUDA_R_16F ? at::kHalf : at::kBFloat16,
                       .m = key.n,
                       .n = key.m,
                       .k = key.k,
                       .lhs = call.b,
                       .lhs_stride = key.ldb,
                       .rhs = call.a,
                       .rhs_stride = key.lda,
                       .rhs_along_k = key.transpose_a != 0,
                       .out = d,
                       .out_stride = key.ldd,
                       .bias = has_bias ? call.bias : nullptr,
                       .bias_type = has_bias ? bias_type : sm90::VectorType::none,
                       .gelu = has_gelu};
}

}  // namespace torch_overlap::cublaslt
