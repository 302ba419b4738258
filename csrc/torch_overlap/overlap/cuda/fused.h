#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/overlap/cuda/direct.h"
#include "torch_overlap/overlap/cuda/words.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// Products for Hopper that wait for the chunks of other ranks, or send them theirs, by themselves:
// one kernel where the executor would issue a product for each chunk.
namespace torch_overlap::cuda {

// A chunk for each rank must fit into the parameters of a kernel.
inline constexpr int kMostFusedRanks = 8;

// By which ranks tell each other that they have begun an operation: the first of this rank's
// entries on each, and of those of each here.
struct BegunWords {
  BegunEntry* tell[kMostFusedRanks];
  const BegunEntry* told[kMostFusedRanks];
};

// Rows of a gather are sent by boxes of so many rows, and bytes of each: elements of so many.
inline constexpr int kSentRows = 16;
inline constexpr int kSentBytes = 512;
inline constexpr int kSentElement = 4;

// All-gather + GEMM: the rows of each chunk are multiplied once they have arrived, by slices of k.
// Copy engines bring each chunk as one slice, in an operation that has begun; or blocks of the
// kernel send, which is then an operation by itself.
struct FusedGatherParams {
  sm90::GemmParams gemm;             // lhs: of this rank's rows; out and m: not looked at
  CUtensorMap gathered;              // all rows
  CUtensorMap out[kMostFusedRanks];  // of the rows of each chunk
  int begin[kMostFusedRanks];        // of each chunk, in rows
  int rows[kMostFusedRanks];
  const float* lhs_scale[kMostFusedRanks];  // where each row has one: those of each chunk
  // The words of each chunk: slice after slice, one of each sender, of copies one.
  const uint32_t* told[kMostFusedRanks];
  int slice_stages;            // of k, in a slice
  int order[kMostFusedRanks];  // which chunk comes when
  OperationParams operation;
  // The first blocks, 32 at most, which send this rank's rows to all others; 0: copy engines do.
  // Those behind them compute so many tiles, or pairs in clusters; they, when they have sent, what
  // is left.
  int senders;
  int units_of_others;
  CUtensorMap own;                    // by such boxes
  CUtensorMap to[kMostFusedRanks];    // where it goes, by as many
  uint32_t* tell[kMostFusedRanks];    // as told
  float* scales_to[kMostFusedRanks];  // where each row has one
  BegunWords begun;
};

// A tile goes to another rank in parts of so many rows of 64 outputs, with time between them, by so
// many warps.
inline constexpr int kPacedRows = 16;
inline constexpr int kMovers = 3;

// GEMM + reduce-scatter: tiles go to the rank that owns their rows, which adds those of all ranks.
struct FusedScatterParams {
  sm90::GemmParams gemm;              // lhs: all rows; out and m: not looked at
  CUtensorMap out;                    // of the own rows
  void* to[kMostFusedRanks];          // where the tiles of other chunks go, n outputs a row
  CUtensorMap from[kMostFusedRanks];  // where those of the other ranks for the own chunk come
  int first[kMostFusedRanks];         // row of each chunk
  int rows[kMostFusedRanks];
  // A word for each tile of a chunk: on the rank that owns the chunk, and of each rank here.
  uint32_t* tell[kMostFusedRanks];
  const uint32_t* told[kMostFusedRanks];
  int most_row_tiles;  // of the largest chunk
  // Between the parts of a tile that one warp stores: where the block's next tile is another
  // rank's, too; and where it is an own one.
  uint32_t pace_ns;
  uint32_t last_pace_ns;
  float factor;  // of the sum, before the bias
  OperationParams operation;
  BegunWords begun;
};

// In how many pieces the rows of a rank may come.
inline constexpr int kMostPieces = 4;

// The own rows of a GEMM + reduce-scatter, whose others are computed and sent otherwise: the sum of
// this product and of what has come of it from the other ranks.
struct FusedSumParams {
  sm90::GemmParams gemm;  // of the own rows
  int sources;            // other ranks; what has come of each, and the flags of its pieces:
  CUtensorMap from[kMostFusedRanks];
  const uint32_t* told[kMostFusedRanks];
  int ranks[kMostFusedRanks];
  int piece_rows;
  int flag_words;  // from the flag of a piece to that of the next one
  float factor;    // of the sum, before the bias
  ChannelWords words;
  WaitControl control;
};

// Null: there is none. `cluster` and `buffers` of the key are not looked at.
const sm90::KernelInfo* find_fused_gather(const sm90::KernelKey& key);
const sm90::KernelInfo* find_fused_scatter(const sm90::KernelKey& key);
const sm90::KernelInfo* find_fused_sum(const sm90::KernelKey& key);

cudaError_t launch_fused_gather(const sm90::KernelInfo& kernel, const FusedGatherParams& params,
                                int blocks, cudaStream_t stream);
cudaError_t launch_fused_scatter(const sm90::KernelInfo& kernel, const FusedScatterParams& params,
                                 int blocks, cudaStream_t stream);
cudaError_t launch_fused_sum(const sm90::KernelInfo& kernel, const FusedSumParams& params,
                             int blocks, cudaStream_t stream);

}  // namespace torch_overlap::cuda
