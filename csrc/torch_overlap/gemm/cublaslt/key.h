#pragma once

#include <ATen/core/Tensor.h>
#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap::cublaslt {

// Everything that an algorithm and its descriptors depend on. The row-major product out = lhs * rhs
// is the column-major product D = A * B with A = rhs, B = lhs and D = out, because each matrix is
// its own transpose in the other order. So m here is the problem's n, and n its m.
struct PlanKey {
  int64_t m, n, k;
  int64_t lda, ldb, ldc, ldd, ld_aux;
  int64_t type_a, type_b, type_c, type_d, type_bias, type_aux;  // cudaDataType_t; -1: there is none
  int64_t transpose_a, transpose_b;
  int64_t compute;                     // cublasComputeType_t
  int64_t epilogue;                    // cublasLtEpilogue_t
  int64_t scale_mode_a, scale_mode_b;  // cublasLtMatmulMatrixScale_t; -1: not scaled
  int64_t quantized_out, has_amax;
  int64_t has_c;  // true if C is added
  int64_t fast_accumulation;
  int64_t reduction_schemes;  // allowed cublasLtReductionScheme_t
  int64_t sm_target;
  int64_t overlaps_communication;
  int64_t workspace;  // in bytes
  // Alignments in bytes, at most 256; 0: there is none.
  int64_t align_a, align_b, align_c, align_d, align_bias, align_aux;
  int64_t device;

  bool operator==(const PlanKey&) const = default;
};
static_assert(std::has_unique_object_representations_v<PlanKey>);

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const noexcept;
};

// One call: its key, and the addresses, which change from call to call.
struct LtMatmulArgs {
  PlanKey key{};
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;  // null: nothing is added
  void* d = nullptr;
  const void* scale_a = nullptr;
  const void* scale_b = nullptr;
  const void* scale_d = nullptr;
  void* amax_d = nullptr;
  void* bias = nullptr;
  void* aux = nullptr;
  // Owners of the memory at the addresses, if it is not the caller's.
  at::Tensor owned_scale_a{};
  at::Tensor owned_scale_b{};
};

struct Workspace {
  void* pointer = nullptr;
  int64_t bytes = 0;
  at::Tensor owner{};
};

cudaDataType_t cuda_type(at::ScalarType type);
// Returns the largest power of two, at most 256, that divides the address.
int64_t alignment_of(const void* pointer);

// Returns the call for the problem with `epilogue` fused and the result in `out`: args.out, or an
// fp32 matrix for the product without its epilogue.
LtMatmulArgs make_matmul_args(const GemmProblem& problem, cublasLtEpilogue_t epilogue,
                              const at::Tensor& out, const Workspace& workspace);

}  // namespace torch_overlap::cublaslt
