#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/overlap/cuda/channel_words.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// Kernels of overlapped operations. Launchers return CUDA's status and launch on `stream`.
namespace torch_overlap::cuda {

// One word on every rank.
struct PeerWords {
  uint32_t* at[kMaxRanks];
};

// First of this rank's entry flags on every rank.
struct PeerEntryFlags {
  EntryFlag* at[kMaxRanks];
};

// Signals to all peers that this rank enters the next operation, waits for the same signal from
// each of them, and then advances the epoch. `entry_flags` points to the entry flags of rank 0 on
// this rank; those of the other ranks follow at a stride of one line. A peer that has entered with
// a different `payload` makes this fail on both ranks. On failure the epoch does not advance:
// copies and flags that follow carry the old one, which nobody waits for. This rank also signals to
// all peers, by `peer_abort_flags`, that it has aborted.
cudaError_t launch_begin(const ChannelWords& words, const PeerEntryFlags& peer_entry_flags,
                         const PeerWords& peer_abort_flags, const EntryFlag* entry_flags,
                         uint32_t payload, const WaitControl& control, cudaStream_t stream);

// Sets a word on every peer to the epoch, after all earlier work on the stream. Signals nothing
// once a wait has failed.
cudaError_t launch_signal_flags(const ChannelWords& words, const PeerWords& peer_flags,
                                const WaitControl& control, cudaStream_t stream);

// Waits until `count` flags have reached the epoch.
struct FlagList {
  const uint32_t* at[kMaxRanks];
  int32_t source[kMaxRanks];  // Rank that sets each flag, for error messages.
  int count;
};
cudaError_t launch_await(const ChannelWords& words, const FlagList& flags,
                         const WaitControl& control, cudaStream_t stream);

// Copies `bytes` to a peer by the stores of `blocks` blocks, in clusters of `cluster`, then sets
// `flag` there to the epoch.
cudaError_t launch_copy_signal(const ChannelWords& words, void* to, const void* from, size_t bytes,
                               uint32_t* flag, const WaitControl& control, int blocks, int cluster,
                               cudaStream_t stream);

enum class SumType : int { f64, f32, f16, bf16, e4m3, e5m2 };

struct SumParams {
  const void* parts[kMaxRanks];
  int64_t part_stride[kMaxRanks];  // Elements between successive rows.
  int count;
  void* out;
  int64_t out_stride;
  int64_t rows;
  int64_t columns;
  const float* scale_inv;  // Null for 1.
  double factor;
  const void* bias;  // In the type of `out`; null for none.
  SumType part_type;
  SumType out_type;  // Same as part_type; f32, f16 or bf16 for 8-bit parts.
};
// If `blocks` is 0, the number of blocks follows from the number of rows.
cudaError_t launch_sum(const SumParams& params, int blocks, int cluster, cudaStream_t stream);

// Loads the code of all kernels onto the current device. Must be called before one of them waits
// for another, because lazy loading may synchronize with running kernels.
cudaError_t load_overlap_kernels();
// Loads the kernels of launch_sum().
cudaError_t load_sum_kernels();

}  // namespace torch_overlap::cuda
