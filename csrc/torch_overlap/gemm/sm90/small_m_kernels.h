#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/kernels.h"

// The plain GEMM of few rows (small_m.cuh), also by programmatic dependent launch.
namespace torch_overlap::sm90 {

inline constexpr int kMaxSmallMRows = 32;      // of 16-bit operands
inline constexpr int kMaxSmallMRows8Bit = 64;  // of 8-bit ones
inline constexpr int kSmallMFeatures = 64;     // of a tile
inline constexpr int kSmallMUnit = 16;         // features of a block are a multiple of it
inline constexpr int kSmallMDepthBytes = 128;  // of k per stage

struct SmallMGemmParams {
  SmallMParams product;
  CUtensorMap weight_narrow;  // boxes of the last tile of a block, if it is narrower
  int block_features;         // at most those of a tile if split_k is greater than 1
  // Scales of 8-bit operands: one element each, or if `scaled_by_row` one per row and per feature.
  // Rows and their scales may be results of the kernel before this one, scales of features not.
  const float* rows_scale;
  const float* weight_scale;
  bool scaled_by_row;
  void* out;
  int64_t out_stride;  // in elements
  bool out_is_f16;     // of 8-bit operands; otherwise bf16
};

struct SmallMKernelKey {
  OperandType type;  // bf16, f16 or e4m3, of both operands
  int rows;
  int split_k;  // blocks of a cluster that share a tile along k: 1, 2 or 4
  // Weights are loaded before the kernel before this one has ended, and rows after. If false, both
  // are loaded after.
  bool loads_weight_early;
};
// `columns` are the features of a tile, `rows` the rows of a box of SmallMParams::rows. Returns
// null if there is none.
const KernelInfo* find_small_m_kernel(const SmallMKernelKey& key);

// `blocks`: split_k for each of the parts of block_features, in an even number: clusters are pairs
// if split_k is 1. `is_dependent`: it may start when the kernel before it allows that.
cudaError_t launch_small_m(const KernelInfo& kernel, const SmallMGemmParams& params, int blocks,
                           bool is_dependent, cudaStream_t stream);

}  // namespace torch_overlap::sm90
