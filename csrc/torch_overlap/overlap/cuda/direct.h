#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// Kernels that are operations of a channel by themselves: their blocks meet those of the other
// ranks, and the last one to end sets the epoch.
namespace torch_overlap::cuda {

inline constexpr int kMostDirectRanks = 8;

struct OperationParams {
  ChannelWords words;
  uint32_t* busy;  // not 0: such a kernel runs
  uint32_t rows;   // and the way (symm/begin.h): the same on all ranks, or the operation fails
  WordOfAll gone;
  WaitControl control;
};

// The sum of what all ranks have. Vectors are of 16 bytes, elements of them of `type`: f32, f16 or
// bf16. Block b talks to block b of the other ranks, which have as many.
struct DirectSumParams {
  OperationParams operation;
  const uint4* products[kMostDirectRanks];  // of each rank: all vectors
  uint32_t begin;                           // those that this rank sums
  uint32_t count;
  void* own;  // where they go: `count` vectors
  // Two shots; null: one. What this rank sums goes to `sums` too, and from `all_sums` come those of
  // each rank: `slice` vectors, the last ones fewer or none, to `out`, which has `total`.
  uint4* sums;
  const uint4* all_sums[kMostDirectRanks];
  uint32_t slice;
  uint32_t total;
  void* out;
  bool is_aligned;  // own and out, to 16 bytes
  float factor;
  const void* bias;  // null: 0; a row is so many vectors:
  uint32_t columns;
  uint32_t* flags[kMostDirectRanks];  // the first flag on each rank
  SumType type;
};
cudaError_t launch_direct_sum(const DirectSumParams& params, int blocks, cudaStream_t stream);

// This rank's rows to all, its own included.
struct DirectGatherParams {
  OperationParams operation;
  void* to[kMostRanks];
  const void* from;
  size_t bytes;
  BegunEntriesOfAll begin;  // as of launch_begin()
  const BegunEntry* begun;
  WordOfAll flag;        // this rank's on each rank
  const uint32_t* told;  // the flag of rank 0 here; those of the others follow in steps of a line
};
cudaError_t launch_direct_gather(const DirectGatherParams& params, cudaStream_t stream);

// As load_overlap_kernels(), which calls these.
cudaError_t load_direct_sum_kernels();
cudaError_t load_direct_gather_kernels();

}  // namespace torch_overlap::cuda
