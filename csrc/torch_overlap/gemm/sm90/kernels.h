#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/params.h"

// Plain GEMMs. Launchers return a CUDA status.
namespace torch_overlap::sm90 {

enum class OperandType : int { bf16, f16, e4m3, e5m2 };

// Selects a kernel.
struct KernelKey {
  OperandType lhs;
  OperandType rhs;      // like lhs, or the other 8-bit type; not both e5m2
  ElementType out;      // bf16 or f16; that of 16-bit operands
  bool is_rhs_k_major;  // always true for 8-bit operands
  int rows;             // rows of a tile
  int columns;
  // If false, the operands have 16 bits, rhs is not K-major either, and there is no fused kernel.
  bool is_lhs_k_major = true;
};

struct KernelInfo {
  const void* kernel;
  int rows;
  int columns;
  int cluster;
  int rhs_box_bytes;  // of the columns of rhs that are loaded at a time, if it is not K-major
  int depth;          // elements of k per stage
  int threads;        // threads per block
  int shared_bytes;
};
// Returns null if there is none.
const KernelInfo* find_kernel(const KernelKey& key);

cudaError_t launch_gemm(const KernelInfo& kernel, const GemmParams& params, int blocks,
                        cudaStream_t stream);

// The same with a residual.
const KernelInfo* find_residual_kernel(const KernelKey& key);

cudaError_t launch_residual(const KernelInfo& kernel, const ResidualParams& params, int blocks,
                            cudaStream_t stream);

}  // namespace torch_overlap::sm90
