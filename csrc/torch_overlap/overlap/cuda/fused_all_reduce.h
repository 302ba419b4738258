#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/overlap/cuda/low_latency.h"
#include "torch_overlap/symm/entry.h"

// GEMM + all-reduce of few rows in one kernel.
namespace torch_overlap::cuda {

struct FusedAllReduceKernel {
  const void* kernel;
  int rows;      // Maximum number of rows.
  int features;  // Features per tile.
  int cluster;   // Blocks per tile; each multiplies a part of k.
  int depth;     // Elements of k per stage.
  int threads;
  int shared_bytes;
  // Bytes that a block sends to each rank: by LL (zero if not supported), and by Simple without its
  // flag.
  int ll_bytes;
  int simple_bytes;
};

struct FusedAllReduceParams {
  OperationParams operation;
  sm90::SmallMParams product;
  // Scales of 8-bit operands: one per tensor, or one per row and per feature.
  const float* rows_scale;
  const float* weight_scale;
  bool scaled_by_row;
  void* out;  // [m, n], contiguous, aligned to 16 bytes.
  float factor;
  const void* bias;  // [n], in the type of out; null for none.
  // Slots on each rank, which all ranks write. LL and Simple use separate memory, because an LL
  // packet is recognized by the epoch in one of its words.
  bool use_ll;
  char* slots[kMaxLowLatencyRanks];
  int64_t odd_epoch_offset;  // Offset in bytes of the slots of odd epochs.
  // One flag per block, stored after its Simple data: this rank's on each rank, and each rank's
  // here.
  uint32_t* peer_flags[kMaxLowLatencyRanks];
  const uint32_t* notified[kMaxLowLatencyRanks];
  // Entry flags: the first of this rank's on each rank, and the first of each rank's here.
  EntryFlag* begin[kMaxLowLatencyRanks];
  const EntryFlag* entry_flags[kMaxLowLatencyRanks];
};

// Returns the kernels for the types and the weight layout of the key; the weight is the key's rhs.
// They are sorted by ascending `rows`; the span is empty if there are none. The key's tile is
// ignored.
std::span<const FusedAllReduceKernel> fused_all_reduce_kernels(const sm90::KernelKey& key);

cudaError_t launch_fused_all_reduce(const FusedAllReduceKernel& kernel,
                                    const FusedAllReduceParams& params, int blocks,
                                    cudaStream_t stream);

}  // namespace torch_overlap::cuda
