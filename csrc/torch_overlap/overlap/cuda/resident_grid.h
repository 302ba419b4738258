#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {

// Grid of a kernel that waits for results of other ranks. It leaves two SMs free, enough for a
// cluster of two, on which kernels of other streams make progress one block or cluster at a time.
// Otherwise a kernel of another stream that also waits for ranks might never start here, while on
// another rank, on which it started first, it holds all SMs that the products of this operation
// need.
struct ResidentGrid {
  explicit ResidentGrid(int sms_of_device) : sms(sms_of_device) {}

  // At least two, so that the SMs left free are pairs, too. One block of a pair may have no tile.
  static int cluster_of(const KernelInfo& kernel) { return std::max(kernel.cluster, 2); }
  int max_blocks(const KernelInfo& kernel) const {
    const int cluster = cluster_of(kernel);
    return std::max(1, sms / cluster - 1) * cluster;
  }
  int num_blocks(const KernelInfo& kernel, int64_t units) const {
    const int cluster = cluster_of(kernel);
    const int64_t needed = ceil_div(units * kernel.cluster, cluster) * cluster;
    return static_cast<int>(std::min<int64_t>(needed, max_blocks(kernel)));
  }
  int64_t waves(const KernelInfo& kernel, int64_t units) const {
    return ceil_div(units * kernel.cluster, max_blocks(kernel));
  }
  template <typename Params>
  using Launch = cudaError_t (*)(const KernelInfo&, const Params&, int, cudaStream_t);
  template <typename Params>
  cudaError_t start(Launch<Params> launch, KernelInfo kernel, const Params& params, int64_t units,
                    cudaStream_t stream) const {
    const int blocks = num_blocks(kernel, units);
    kernel.cluster = cluster_of(kernel);
    return launch(kernel, params, blocks, stream);
  }

  const int sms;
};

}  // namespace torch_overlap::cuda
