#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <vector>

#include "torch_overlap/gemm/cublaslt/descriptors.h"
#include "torch_overlap/gemm/cublaslt/key.h"
#include "torch_overlap/gemm/sm90/gemm.h"

namespace torch_overlap::cublaslt {

// The descriptors and the algorithm of all calls with one key. Thread-safe. The device of the key
// must be current.
class Plan {
 public:
  // Requests an algorithm from the library. 8-bit operands of few rows use this project's kernel
  // for them if there is one: the library multiplies 128 rows. A plan is also created if the
  // library refuses the problem, so that it is not asked again: then one of this project's kernels
  // is used if the operands have 8 bits and there is one.
  Plan(cublasLtHandle_t handle, const LtMatmulArgs& call);

  // Returns false, without enqueuing anything, if nothing here supports the problem. With measured
  // tuning, and outside of captures, the first call measures.
  bool run(cublasLtHandle_t handle, const LtMatmulArgs& call, const Workspace& workspace,
           cudaStream_t stream);

 private:
  void fall_back_to_custom_kernel(const LtMatmulArgs& call);
  std::vector<cublasLtMatmulAlgo_t> query(cublasLtHandle_t handle, int max_algorithms) const;
  void set_addresses(const LtMatmulArgs& call) const;
  cublasStatus_t launch(cublasLtHandle_t handle, const LtMatmulArgs& call, void* d,
                        const cublasLtMatmulAlgo_t& algorithm, const Workspace& workspace,
                        cudaStream_t stream) const;
  // Selects the fastest of the library's proposals and of this project's kernels.
  void measure(cublasLtHandle_t handle, const LtMatmulArgs& call, const Workspace& workspace,
               cudaStream_t stream);

  std::mutex mutex_;
  const PlanKey key_;
  const bool has_few_rows_;  // of 8-bit operands, for which there is a kernel
  Owned<cublasLtMatmulDesc_t> matmul_;
  Owned<cublasLtMatrixLayout_t> a_, b_, c_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;  // empty: refused
  std::optional<sm90::TileShape>
      custom_tile_;  // replaces algorithm_: measured as faster, or the only support
  bool measured_ = false;
};

}  // namespace torch_overlap::cublaslt
