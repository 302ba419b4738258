#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/params.h"

// Plain products. Launchers return CUDA's status.
namespace torch_overlap::sm90 {

enum class OperandType : int { bf16, f16, e4m3, e5m2 };

// Which kernel.
struct KernelKey {
  OperandType lhs;
  OperandType rhs;   // as lhs, or the other one of 8 bits; not both e5m2
  VectorType out;    // bf16 or f16; as the operands, if these have 16 bits
  bool rhs_along_k;  // always, of 8 bits
  int rows;          // of a tile
  int columns;
  // Else the operands have 16 bits, rhs is not along k either, and no fused kernel has it.
  bool lhs_along_k = true;
};

struct KernelInfo {
  const void* kernel;
  int rows;
  int columns;
  int cluster;
  int rhs_box_bytes;  // of the columns of rhs that are loaded at a time, where it does not lie
                      // along k
  int depth;          // of k in a stage
  int threads;        // of a block
  int shared_bytes;
};
// Null: there is none.
const KernelInfo* find_kernel(const KernelKey& key);

cudaError_t launch_gemm(const KernelInfo& kernel, const GemmParams& params, int blocks,
                        cudaStream_t stream);

// The same with a residual.
const KernelInfo* find_residual(const KernelKey& key);

cudaError_t launch_residual(const KernelInfo& kernel, const ResidualParams& params, int blocks,
                            cudaStream_t stream);

}  // namespace torch_overlap::sm90
