#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/params.h"

// Plain products. Launchers return CUDA's status.
namespace torch_overlap::sm90 {

enum class OperandType : int { bf16, f16 };

// Which kernel; rows of lhs lie along k.
struct KernelKey {
  OperandType in;
  VectorType out;  // bf16 or f16, as the operands
  bool rhs_along_k;
  int rows;  // of a tile
  int columns;
};

struct KernelInfo {
  const void* kernel;
  int rows;
  int columns;
  int cluster;
  int depth;    // of k in a stage
  int threads;  // of a block
  int shared_bytes;
};
// Null: there is none.
const KernelInfo* find_kernel(const KernelKey& key);

cudaError_t launch_gemm(const KernelInfo& kernel, const GemmParams& params, int blocks,
                        cudaStream_t stream);

}  // namespace torch_overlap::sm90
