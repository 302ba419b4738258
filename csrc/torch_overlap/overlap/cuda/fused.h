#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/overlap/cuda/channel_words.h"
#include "torch_overlap/overlap/cuda/low_latency.h"
#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/entry.h"

// Hopper GEMM kernels that wait for the chunks of other ranks, or send chunks to them, themselves:
// one kernel in place of one product per chunk.
namespace torch_overlap::cuda {

// The kernel parameters must hold one chunk per rank.
inline constexpr int kMaxFusedRanks = 8;

// Flags by which ranks signal that they have entered an operation. peer_flags[r] is the first of
// this rank's entry flags on rank r; notified[r] is the first of rank r's entry flags on this rank.
struct EntryFlags {
  EntryFlag* peer_flags[kMaxFusedRanks];
  const EntryFlag* notified[kMaxFusedRanks];
};

// Box of the TMA copies that send the rows of a gather: its rows, the bytes of each row, and the
// bytes of an element of the tensor map.
inline constexpr int kSendBoxRows = 16;
inline constexpr int kSendBoxBytes = 512;
inline constexpr int kSendElementBytes = 4;

// All-gather + GEMM: the rows of each chunk are multiplied as they arrive, one slice of k at a
// time. Copy engines send each chunk as a single slice, within an operation that has already begun;
// or blocks of the kernel send the rows, and the kernel is an operation by itself.
struct FusedGatherParams {
  sm90::GemmParams gemm;            // lhs: this rank's rows. out and m are ignored.
  CUtensorMap gathered;             // Rows of all ranks.
  CUtensorMap out[kMaxFusedRanks];  // Output rows of each chunk.
  int begin[kMaxFusedRanks];        // First row of each chunk.
  int rows[kMaxFusedRanks];
  const float* lhs_scale[kMaxFusedRanks];  // Row scales of each chunk, if each row has one.
  // Flags of each chunk, slice by slice. A slice has one flag per sender; one flag if copy engines
  // send.
  const uint32_t* notified[kMaxFusedRanks];
  int slice_stages;           // Stages of k per slice.
  int order[kMaxFusedRanks];  // Chunks in the order in which they arrive.
  OperationParams operation;
  // Number of blocks, the first of the grid and at most 32, that send this rank's rows to all
  // peers; zero if copy engines send. The other blocks compute `num_nonsender_units` units (tiles,
  // or one tile per block of a cluster). The senders compute the rest after they have sent.
  int senders;
  int num_nonsender_units;
  CUtensorMap own;                       // This rank's rows, in boxes of kSendBoxRows.
  CUtensorMap to[kMaxFusedRanks];        // Destination on each rank, in the same boxes.
  uint32_t* peer_flags[kMaxFusedRanks];  // This rank's flags on each rank; same layout as notified.
  float* scales_to[kMaxFusedRanks];      // Destination of the row scales, if each row has one.
  EntryFlags entry_flags;
};

// A mover stores a tile for another rank in parts of kPacedRows rows of 64 outputs, with pauses
// between them. kMovers is the number of mover warps.
inline constexpr int kPacedRows = 16;
inline constexpr int kMovers = 3;

// GEMM + reduce-scatter: each tile is sent to the rank that owns its rows, which adds the tiles of
// all ranks.
struct FusedReduceScatterParams {
  sm90::GemmParams gemm;             // lhs: rows of all ranks. out and m are ignored.
  CUtensorMap out;                   // This rank's rows.
  void* to[kMaxFusedRanks];          // Destination of the tiles for each peer; n outputs per row.
  CUtensorMap from[kMaxFusedRanks];  // Tiles that each peer sends for this rank's chunk.
  int first[kMaxFusedRanks];         // First row of each chunk.
  int rows[kMaxFusedRanks];
  // One flag per tile of a chunk. peer_flags[r]: this rank's flags on rank r, which owns the chunk.
  // notified[r]: rank r's flags on this rank.
  uint32_t* peer_flags[kMaxFusedRanks];
  const uint32_t* notified[kMaxFusedRanks];
  int max_row_tiles;  // Row tiles of the largest chunk.
  // Pauses between the parts of a tile that one warp stores. `pace_ns` applies if the next tile of
  // the block is for another rank, too; `last_pace_ns` applies otherwise.
  uint32_t pace_ns;
  uint32_t last_pace_ns;
  float factor;  // Applied to the sum, before the bias.
  OperationParams operation;
  EntryFlags entry_flags;
};

// Maximum number of pieces in which the rows of a rank arrive.
inline constexpr int kMaxPieces = 4;

// This rank's rows of a GEMM + reduce-scatter whose other rows are computed and sent otherwise:
// adds to this product the rows that arrived from the peers.
struct FusedReduceScatterSumParams {
  sm90::GemmParams gemm;  // lhs: this rank's rows.
  int sources;            // Number of peers. For each: its data, the first of its flags, its rank.
  CUtensorMap from[kMaxFusedRanks];
  const uint32_t* notified[kMaxFusedRanks];
  int ranks[kMaxFusedRanks];
  int piece_rows;
  int flag_words;  // Words between the flags of successive pieces.
  float factor;    // Applied to the sum, before the bias.
  ChannelWords words;
  WaitControl control;
};

// Each returns null if there is no such kernel.
const sm90::KernelInfo* find_fused_gather(const sm90::KernelKey& key);
const sm90::KernelInfo* find_fused_reduce_scatter(const sm90::KernelKey& key);
const sm90::KernelInfo* find_fused_reduce_scatter_sum(const sm90::KernelKey& key);

cudaError_t launch_fused_gather(const sm90::KernelInfo& kernel, const FusedGatherParams& params,
                                int blocks, cudaStream_t stream);
cudaError_t launch_fused_reduce_scatter(const sm90::KernelInfo& kernel,
                                        const FusedReduceScatterParams& params, int blocks,
                                        cudaStream_t stream);
cudaError_t launch_fused_reduce_scatter_sum(const sm90::KernelInfo& kernel,
                                            const FusedReduceScatterSumParams& params, int blocks,
                                            cudaStream_t stream);

}  // namespace torch_overlap::cuda
