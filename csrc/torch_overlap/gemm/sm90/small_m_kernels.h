#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/kernels.h"

// The plain GEMM of few rows (small_m.cuh), by programmatic dependent launch.
namespace torch_overlap::sm90 {

inline constexpr int kMaxSmallMRows = 32;
inline constexpr int kSmallMFeatures = 64;  // of a tile
inline constexpr int kSmallMDepth = 64;     // elements of k per stage

struct SmallMGemmParams {
  SmallMParams product;
  void* out;
  int64_t out_stride;  // in elements
};

struct SmallMKernelKey {
  ElementType type;  // bf16 or f16, of all matrices
  int rows;          // at most kMaxSmallMRows
  int split_k;       // blocks of a cluster that share a tile along k: 1, 2 or 4
  // Weights are loaded before the kernel before this one has ended, and rows after. If false, both
  // are loaded after.
  bool loads_weight_early;
};
// `columns` are the features of a tile, `rows` the rows of a box of SmallMParams::rows. Returns
// null if there is none.
const KernelInfo* find_small_m_kernel(const SmallMKernelKey& key);

// `blocks`: split_k for each tile, or if split_k is 1 any even number: clusters are pairs then.
cudaError_t launch_small_m(const KernelInfo& kernel, const SmallMGemmParams& params, int blocks,
                           cudaStream_t stream);

}  // namespace torch_overlap::sm90
