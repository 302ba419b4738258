#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/index_range.h"
#include "torch_overlap/base/rounding.h"

// Schedules of overlapped operations, as values: pure functions of rank and size, which every
// executor follows. Chunk r is the chunk of rank r.
namespace torch_overlap {

// Distribution of the rows of a tensor over `size` ranks: equal parts, rounded up, in rank order.
// The last rank that has rows may have fewer, and ranks after it have none (the rule of torch's
// DTensor).
struct RowPartition {
  int64_t rows = 0;  // a multiple of unit
  int size = 1;
  int64_t unit = 1;  // every share is a multiple of it

  int64_t largest() const { return ceil_div(rows, size * unit) * unit; }
  TORCH_OVERLAP_API int64_t begin(int rank) const;
  TORCH_OVERLAP_API int64_t length(int rank) const;
};

// One exchange in which this rank takes part: it sends one chunk and receives one. In the n-th
// exchange every rank sends to one rank and receives from one.
struct Exchange {
  int dst;
  int send;  // the chunk that is sent to `dst`
  int src;
  int recv;  // the chunk that is received
  bool operator==(const Exchange&) const = default;
};

// One GEMM, of the rows of chunks first .. first + count - 1, all of which have arrived.
struct ChunkStep {
  int first;
  int count = 1;
  bool operator==(const ChunkStep&) const = default;
};

// An all-gather that GEMMs read chunk by chunk.
//
// all_pairs: every chunk is sent by its owner. Nothing is forwarded, so all exchanges can be in
// flight at once. Rank 1 of 4:
//
//   product    chunk 1          chunk 0          chunk 3          chunk 2
//   exchange   recv 0, send 1   recv 3, send 1   recv 2, send 1
//              src 0, dst 2     src 3, dst 3     src 2, dst 0
//
// ring: every chunk is forwarded from neighbour to neighbour, for topologies with links between
// neighbours only.
//
//   product    chunk 1          chunk 0          chunk 3          chunk 2
//   exchange   recv 0, send 1   recv 3, send 0   recv 2, send 3
//              src 0, dst 2     src 0, dst 2     src 0, dst 2
//
// chunk_pairs: like all_pairs, but two neighbouring chunks form one GEMM: fewer and larger GEMMs,
// the first of which has to wait. Even sizes only. Rank 1 of 4:
//
//   product                     chunks 0, 1                      chunks 2, 3
//   exchange   recv 0, send 1   recv 3, send 1   recv 2, send 1
struct GatherSchedule {
  std::vector<Exchange> exchanges;
  std::vector<ChunkStep> steps;
};
enum class GatherOrder { all_pairs, ring, chunk_pairs };
TORCH_OVERLAP_API GatherSchedule gather_schedule(int rank, int size, GatherOrder order);

// A reduce-scatter of partial products: each is sent to the rank that sums its rows. Rank 1 of 4:
//
//   product    chunk 2         chunk 3         chunk 0         chunk 1
//   exchange                   send 2 to 2     send 3 to 3     send 0 to 0
//                              part from 0     part from 3     part from 2      then the sum
//
// This rank's chunk is last: its GEMM hides the last exchange. exchanges[i] sends the result of
// steps[i]; `recv` is this rank's chunk, of which `src` sends its partial sum.
struct ReduceScatterSchedule {
  std::vector<ChunkStep> steps;
  std::vector<Exchange> exchanges;  // one fewer than steps
};
TORCH_OVERLAP_API ReduceScatterSchedule reduce_scatter_schedule(int rank, int size);

// True if a low-latency all-reduce of `bytes` over peer-mapped memory uses one shot: each rank
// reads the whole operand of every other rank. Two shots: each rank sums its part, and reads the
// sums of the others from them. With two ranks both read the same amount.
TORCH_OVERLAP_API bool uses_one_shot(int64_t bytes, int size);

// Layout of that memory: the operand of this rank, `rows` of row_bytes, at offset 0; and at
// sums_offset the sums of this rank's part (with room for the largest part), which the others read.
// sums_offset depends only on the total size, so the operand of one operation never overlaps the
// sums of another.
inline constexpr int64_t kSumAlignment = 128;
inline int64_t low_latency_sum_bytes(const RowPartition& rows, int64_t row_bytes) {
  const int64_t part = rows.largest() * row_bytes;
  return (rows.size + 1) * round_up(part, kSumAlignment);
}
inline int64_t low_latency_sums_offset(int64_t bytes, int size) {
  return bytes / (size + 1) / kSumAlignment * kSumAlignment * size;
}
// Maximum number of blocks of such a kernel. Each block has two flags of its own for each rank.
inline constexpr int kMaxLowLatencyBlocks = 128;

// Splits [0, total) into at most `count` consecutive pieces. None is empty, and all but the last
// have the same length, a multiple of `multiple`.
TORCH_OVERLAP_API std::vector<IndexRange> pieces(int64_t total, int64_t count,
                                                 int64_t multiple = 1);

// Returns the order in which the GEMMs (G) of a pipeline and the reduce-scatters (R) of their
// results are issued: overlap_first_gemm false: G0 R0 G1 R1 G2 R2; true: G0 G1 R0 G2 R1 R2, so that
// a GEMM does not queue after an exchange on a device with one queue.
struct PipelineStep {
  bool is_product;
  int piece;
  bool operator==(const PipelineStep&) const = default;
};
TORCH_OVERLAP_API std::vector<PipelineStep> pipeline_order(int count, bool overlap_first_gemm);

}  // namespace torch_overlap
