#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/overlap/cuda/words.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// The kernels of overlapped operations. Launchers return CUDA's status; all run on `stream`.
namespace torch_overlap::cuda {

// One word on every rank.
struct WordOfAll {
  uint32_t* at[kMostRanks];
};

// The first of this rank's entries on every rank.
struct BegunEntriesOfAll {
  BegunEntry* at[kMostRanks];
};

// Tells all others that this rank begins the operation after the epoch, waits until they have told
// the same, and takes that epoch. Where that fails it does not: the copies and words that follow
// carry the old one, which nobody waits for; and it tells all others, by `gone`, that this rank has
// given up. `begun`: the entries of rank 0 here, those of the others follow in steps of a line. A
// rank that has begun with other `rows` makes this fail, there as here.
cudaError_t launch_begin(const ChannelWords& words, const BegunEntriesOfAll& told,
                         const WordOfAll& gone, const BegunEntry* begun, uint32_t rows,
                         const WaitControl& control, cudaStream_t stream);

// Sets a word of every other rank to the epoch, after all that was before it on the stream. Nothing
// is told once a wait has failed.
cudaError_t launch_tell(const ChannelWords& words, const WordOfAll& told,
                        const WaitControl& control, cudaStream_t stream);

// Waits until the words of `count` flags have come to the epoch.
struct FlagList {
  const uint32_t* at[kMostRanks];
  int32_t number[kMostRanks];  // for errors: of the rank that it is of
  int count;
};
cudaError_t launch_await(const ChannelWords& words, const FlagList& flags,
                         const WaitControl& control, cudaStream_t stream);

// Copies `bytes` to another rank with the stores of `blocks` blocks, in clusters of `cluster`, then
// sets `flag` there to the epoch.
cudaError_t launch_push(const ChannelWords& words, void* to, const void* from, size_t bytes,
                        uint32_t* flag, const WaitControl& control, int blocks, int cluster,
                        cudaStream_t stream);

enum class SumType : int { f64, f32, f16, bf16, e4m3, e5m2 };

struct SumParams {
  const void* parts[kMostRanks];
  int64_t part_stride[kMostRanks];  // elements from row to row
  int count;
  void* out;
  int64_t out_stride;
  int64_t rows;
  int64_t columns;
  const float* scale_inv;  // null: 1
  double factor;
  const void* bias;  // of the type of `out`; null: 0
  SumType part_type;
  SumType out_type;  // that of the parts; for 8-bit parts f32, f16 or bf16
};
// blocks 0: as many as are good.
cudaError_t launch_sum(const SumParams& params, int blocks, int cluster, cudaStream_t stream);

// Loads the code of all kernels onto the current device, before one of them waits for another.
cudaError_t load_overlap_kernels();
// Those of launch_sum().
cudaError_t load_sum_kernels();

}  // namespace torch_overlap::cuda
