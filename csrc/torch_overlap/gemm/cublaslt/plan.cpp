#include "torch_overlap/gemm/cublaslt/plan.h"

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/gemm/counters.h"
#include "torch_overlap/gemm/cublaslt/custom_kernel.h"
#include "torch_overlap/gemm/options.h"

namespace torch_overlap::cublaslt {
namespace {

Owned<cublasLtMatmulDesc_t> make_matmul_desc(const PlanKey& key) {
  auto matmul = create_matmul_desc(static_cast<cublasComputeType_t>(key.compute));
  set(matmul.get(), CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(matmul.get(), CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(matmul.get(), CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(key.epilogue));
  if (key.type_bias >= 0) {
    set(matmul.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(key.type_bias));
  }
  if (key.type_aux >= 0) {
    set(matmul.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.ld_aux);
    set(matmul.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE,
        static_cast<int32_t>(key.type_aux));
  }
  if (key.scale_mode_a >= 0) {
    set(matmul.get(), CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(key.scale_mode_a));
    set(matmul.get(), CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(key.scale_mode_b));
  }
  if (key.fast_accumulation != 0) {
    set(matmul.get(), CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(1));
  }
  if (key.sm_target != 0) {
    set(matmul.get(), CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, static_cast<int32_t>(key.sm_target));
  }
  return matmul;
}

Owned<cublasLtMatrixLayout_t> make_operand(int64_t type, int64_t transposed, int64_t rows,
                                           int64_t columns, int64_t leading) {
  return make_layout(static_cast<cudaDataType_t>(type), transposed != 0 ? columns : rows,
                     transposed != 0 ? rows : columns, leading);
}

// True if this project has a kernel for 8-bit operands of few rows.
bool has_few_rows_kernel(const LtMatmulArgs& call) {
  if (call.key.scale_mode_a < 0) return false;
  const auto product = custom_kernel_problem(call, call.d);
  return product && sm90::supports_small_m(*product);
}

}  // namespace

Plan::Plan(cublasLtHandle_t handle, const LtMatmulArgs& call)
    : key_(call.key),
      has_few_rows_(has_few_rows_kernel(call)),
      matmul_(make_matmul_desc(key_)),
      a_(make_operand(key_.type_a, key_.transpose_a, key_.m, key_.k, key_.lda)),
      b_(make_operand(key_.type_b, key_.transpose_b, key_.k, key_.n, key_.ldb)),
      c_(make_operand(key_.type_c, 0, key_.m, key_.n, key_.ldc)),
      d_(make_operand(key_.type_d, 0, key_.m, key_.n, key_.ldd)) {
  count(gemm_counters().plans);
  if (has_few_rows_) return;
  set_addresses(call);
  const auto found = query(handle, 1);
  if (found.empty()) {
    fall_back_to_custom_kernel(call);
  } else {
    algorithm_ = found[0];
  }
}

// For 8-bit operands that the library refuses: sizes that are not multiples of 16, or GELU with a
// residual. All calls with one key have the same alignments.
void Plan::fall_back_to_custom_kernel(const LtMatmulArgs& call) {
  algorithm_.reset();
  if (key_.scale_mode_a < 0) return;
  if (const auto product = custom_kernel_problem(call, call.d))
    custom_tile_ = sm90::heuristic_tile_shape(*product);
}

std::vector<cublasLtMatmulAlgo_t> Plan::query(cublasLtHandle_t handle, int max_algorithms) const {
  // The library would apply the epilogue to the sum with C.
  if (key_.has_c != 0 && (key_.epilogue & CUBLASLT_EPILOGUE_GELU) != 0) return {};
  count(gemm_counters().queries);
  const auto preference = make_preference();
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    set(preference.get(), attribute, value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(key_.workspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(key_.reduction_schemes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key_.align_a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key_.align_b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
         static_cast<uint32_t>(key_.has_c != 0 ? key_.align_c : key_.align_d));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key_.align_d));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(max_algorithms));
  int found = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle, matmul_.get(), a_.get(), b_.get(), c_.get(), d_.get(),
                                     preference.get(), max_algorithms, results.data(), &found);
  if (is_unsupported(status)) return {};
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < found; ++i) {
    const auto& result = results[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  }
  return algorithms;
}

void Plan::set_addresses(const LtMatmulArgs& call) const {
  const auto address = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    if (pointer != nullptr) set(matmul_.get(), attribute, pointer);
  };
  address(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.scale_a);
  address(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.scale_b);
  address(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, call.scale_d);
  address(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, call.amax_d);
  address(CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
  address(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, call.aux);
}

cublasStatus_t Plan::launch(cublasLtHandle_t handle, const LtMatmulArgs& call, void* d,
                            const cublasLtMatmulAlgo_t& algorithm, const Workspace& workspace,
                            cudaStream_t stream) const {
  const float alpha = 1;
  const float beta = key_.has_c != 0 ? 1 : 0;
  const void* const c = key_.has_c != 0 ? call.c : d;
  return cublasLtMatmul(handle, matmul_.get(), &alpha, call.a, a_.get(), call.b, b_.get(), &beta, c,
                        c_.get(), d, d_.get(), &algorithm, workspace.pointer,
                        static_cast<size_t>(workspace.bytes), stream);
}

bool Plan::run(cublasLtHandle_t handle, const LtMatmulArgs& call, const Workspace& workspace,
               cudaStream_t stream) {
  if (has_few_rows_)
    return sm90::run_small_m(*custom_kernel_problem(call, call.d), EarlyStart::none);
  const std::lock_guard lock(mutex_);
  const bool should_measure =
      !measured_ && key_.overlaps_communication == 0 && gemm_tuning() != GemmTuning::kHeuristic;
  if (should_measure && !cuda::capture_of(stream)) {
    set_addresses(call);
    measure(handle, call, workspace, stream);
  }
  if (algorithm_ && !custom_tile_) {
    set_addresses(call);
    const auto status = launch(handle, call, call.d, *algorithm_, workspace, stream);
    if (!is_unsupported(status)) {
      check(status, "cublasLtMatmul");
      return true;
    }
    fall_back_to_custom_kernel(call);  // the heuristics accepted it, the launch did not
  }
  if (!custom_tile_) return false;
  sm90::run(*custom_kernel_problem(call, call.d), *custom_tile_);
  return true;
}

}  // namespace torch_overlap::cublaslt
