#pragma once

#include <cublasLt.h>

#include <memory>
#include <string_view>
#include <type_traits>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::cublaslt {

// Throws if a call of cuBLASLt failed. `what` names the call.
inline void check(cublasStatus_t status, std::string_view what) {
  TORCH_OVERLAP_CHECK(status == CUBLAS_STATUS_SUCCESS, kRuntime, what,
                      ": expected success from cuBLASLt, got ", cublasLtGetStatusName(status), " (",
                      cublasLtGetStatusString(status), ")");
}

// True if the library does not support the problem; false if the call failed otherwise.
inline bool is_unsupported(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

struct Deleter {
  void operator()(cublasLtMatmulDesc_t value) const { (void)cublasLtMatmulDescDestroy(value); }
  void operator()(cublasLtMatrixLayout_t value) const { (void)cublasLtMatrixLayoutDestroy(value); }
  void operator()(cublasLtMatmulPreference_t value) const {
    (void)cublasLtMatmulPreferenceDestroy(value);
  }
};
template <typename Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Deleter>;

inline Owned<cublasLtMatmulDesc_t> create_matmul_desc(cublasComputeType_t compute) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
  return Owned<cublasLtMatmulDesc_t>(made);
}

// Creates the layout of a column-major matrix.
inline Owned<cublasLtMatrixLayout_t> make_layout(cudaDataType_t type, int64_t rows, int64_t columns,
                                                 int64_t leading) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows),
                                   static_cast<uint64_t>(columns), leading),
        "cublasLtMatrixLayoutCreate");
  return Owned<cublasLtMatrixLayout_t>(made);
}

inline Owned<cublasLtMatmulPreference_t> make_preference() {
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  return Owned<cublasLtMatmulPreference_t>(made);
}

template <typename Value>
void set(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute,
         const Value& value) {
  const auto* bytes = static_cast<const void*>(&value);  // correct for pointer values too
  check(cublasLtMatmulDescSetAttribute(matmul, attribute, bytes, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
}

template <typename Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

}  // namespace torch_overlap::cublaslt
