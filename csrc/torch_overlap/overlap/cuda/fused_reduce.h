#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/overlap/cuda/direct.h"
#include "torch_overlap/symm/entry.h"

// GEMM + all-reduce of few rows in one kernel.
namespace torch_overlap::cuda {

struct FusedReduceKernel {
  const void* kernel;
  int rows;      // at most
  int features;  // of a tile
  int cluster;   // blocks of a tile, which have a part of k each
  int depth;     // of k in a stage
  int threads;
  int shared_bytes;
  // What a block sends to each rank, in bytes: as lines (0: it does not), or as vectors, which a
  // flag follows.
  int line_bytes;
  int vector_bytes;
};

struct FusedReduceParams {
  OperationParams operation;
  sm90::FewRowsParams product;
  // Of 8-bit operands: one factor for both, or one for each row and feature.
  const float* rows_scale;
  const float* weight_scale;
  bool scaled_by_row;
  void* out;  // [m, n], contiguous, to 16 bytes
  float factor;
  const void* bias;  // [n], of the type of out; null: 0
  // Of each rank: what all send there. Lines and vectors have memory of their own, for a line is
  // known by one of its words.
  bool by_lines;
  char* slots[kMostDirectRanks];
  int64_t odd_at;  // of operations of odd epochs, from there on
  // A word for each block, behind its vectors: on each rank, and of each rank here.
  uint32_t* tell[kMostDirectRanks];
  const uint32_t* told[kMostDirectRanks];
  // Entries: the first of this rank's on each, and of those of each rank here.
  BegunEntry* begin[kMostDirectRanks];
  const BegunEntry* begun[kMostDirectRanks];
};

// By types and the way that the weight, the key's rhs, lies; its tile is not looked at. None, or
// those of fewer rows first.
std::span<const FusedReduceKernel> fused_reduce_kernels(const sm90::KernelKey& key);

cudaError_t launch_fused_reduce(const FusedReduceKernel& kernel, const FusedReduceParams& params,
                                int blocks, cudaStream_t stream);

}  // namespace torch_overlap::cuda
