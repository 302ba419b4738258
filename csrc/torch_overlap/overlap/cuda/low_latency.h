#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// Kernels that are operations of a channel by themselves: their blocks synchronize with those of
// the other ranks, and the last block to finish sets the epoch.
namespace torch_overlap::cuda {

inline constexpr int kMaxLowLatencyRanks = 8;

struct OperationParams {
  ChannelWords words;
  uint32_t* busy;    // Nonzero while such a kernel runs.
  uint32_t payload;  // EntryPayload::word(). The operation fails if ranks differ.
  PeerWords peer_abort_flags;
  WaitControl control;
};

// Sum of the products of all ranks, in vectors of 16 bytes whose elements have `type`: f32, f16 or
// bf16. Block b synchronizes with block b of the other ranks, which launch the same number of
// blocks.
struct LowLatencySumParams {
  OperationParams operation;
  const uint4* products[kMaxLowLatencyRanks];  // All vectors of each rank.
  uint32_t begin;                              // First of the vectors that this rank sums.
  uint32_t count;                              // Number of these vectors.
  void* own;                                   // Their destination.
  // Two shot; null for one shot. This rank's sums are also stored to `sums`. The sums of each rank
  // are read from `all_sums`, `slice` vectors each (the last ranks have fewer or none), and stored
  // to `out`, which has `total` vectors.
  uint4* sums;
  const uint4* all_sums[kMaxLowLatencyRanks];
  uint32_t slice;
  uint32_t total;
  void* out;
  bool is_aligned;  // own and out are aligned to 16 bytes.
  float factor;
  const void* bias;                      // Null for none.
  uint32_t columns;                      // Vectors per row.
  uint32_t* flags[kMaxLowLatencyRanks];  // First flag on each rank.
  SumType type;
};
cudaError_t launch_low_latency_sum(const LowLatencySumParams& params, int blocks,
                                   cudaStream_t stream);

// Stores this rank's rows to all ranks, including itself.
struct LowLatencyGatherParams {
  OperationParams operation;
  void* to[kMaxRanks];
  const void* from;
  size_t bytes;
  PeerEntryFlags begin;  // Same as for launch_begin().
  const EntryFlag* entry_flags;
  PeerWords flag;  // This rank's flag on each rank.
  const uint32_t*
      notified;  // First flag of rank 0 here; the others follow at a stride of one line.
};
cudaError_t launch_low_latency_gather(const LowLatencyGatherParams& params, cudaStream_t stream);

// Like load_overlap_kernels(), which calls these.
cudaError_t load_low_latency_sum_kernels();
cudaError_t load_low_latency_gather_kernels();

}  // namespace torch_overlap::cuda
