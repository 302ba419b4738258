#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <vector>

#include "torch_overlap/gemm/cublaslt/descriptors.h"
#include "torch_overlap/gemm/cublaslt/key.h"
#include "torch_overlap/gemm/sm90/product.h"

namespace torch_overlap::cublaslt {

// The descriptors and the algorithm of all calls with one key. Threads: any, one at a time. The
// device of the key is current.
class Plan {
 public:
  // Asks the library for an algorithm. A problem that it refuses makes a plan too, so that it is
  // asked once: of one of our own kernels, where operands have 8 bits and there is one.
  Plan(cublasLtHandle_t handle, const LtCall& call);

  // False where nothing here computes the problem; then nothing is on the stream. With measured
  // tuning, and outside of captures, the first call measures.
  bool run(cublasLtHandle_t handle, const LtCall& call, const Workspace& workspace,
           cudaStream_t stream);

 private:
  void refuse(const LtCall& call);
  std::vector<cublasLtMatmulAlgo_t> query(cublasLtHandle_t handle, int most) const;
  void set_addresses(const LtCall& call) const;
  cublasStatus_t launch(cublasLtHandle_t handle, const LtCall& call, void* d,
                        const cublasLtMatmulAlgo_t& algorithm, const Workspace& workspace,
                        cudaStream_t stream) const;
  // The fastest of the library's proposals and of our own kernels.
  void measure(cublasLtHandle_t handle, const LtCall& call, const Workspace& workspace,
               cudaStream_t stream);

  std::mutex mutex_;
  const PlanKey key_;
  Owned<cublasLtMatmulDesc_t> matmul_;
  Owned<cublasLtMatrixLayout_t> a_, b_, c_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;  // none: refused
  std::optional<sm90::Choice> own_;  // in its place: measured as faster, or as nothing else will do
  bool measured_ = false;
};

}  // namespace torch_overlap::cublaslt
