#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"

// How an overlapped operation is cut into steps, as values: pure functions of rank and size, which
// every executor follows. Chunk r is that of rank r.
namespace torch_overlap {

// Rows of a tensor that `size` ranks share: equal parts, rounded up, in rank order. The last ranks
// that have rows may have fewer, those behind them none (the rule of torch's DTensor).
struct RowShare {
  int64_t rows = 0;  // a multiple of unit
  int size = 1;
  int64_t unit = 1;  // what a share is a multiple of

  int64_t largest() const {
    const int64_t units = size * unit;
    return (rows + units - 1) / units * unit;
  }
  TORCH_OVERLAP_API int64_t begin(int rank) const;
  TORCH_OVERLAP_API int64_t length(int rank) const;
};

// One move of data that this rank takes part in, twice: it gives a chunk and gets one. In the n-th
// exchange every rank gives to one rank and gets from one.
struct Exchange {
  int to;
  int give;  // the chunk that goes there
  int from;
  int get;  // the chunk that comes
  bool operator==(const Exchange&) const = default;
};

// One product: of the rows of chunks first .. first + count - 1, all of which have arrived.
struct ChunkStep {
  int first;
  int count = 1;
  bool operator==(const ChunkStep&) const = default;
};

// An all-gather that a product reads chunk by chunk.
//
// direct: every chunk comes from its owner. Nothing is forwarded, so all exchanges can be under way
// at once. Rank 1 of 4:
//
//   product    chunk 1         chunk 0         chunk 3         chunk 2
//   exchange   get 0, give 1   get 3, give 1   get 2, give 1
//              from 0, to 2    from 3, to 3    from 2, to 0
//
// ring: every chunk goes round, from neighbour to neighbour; for links between neighbours only.
//
//   product    chunk 1         chunk 0         chunk 3         chunk 2
//   exchange   get 0, give 1   get 3, give 0   get 2, give 3
//              from 0, to 2    from 0, to 2    from 0, to 2
//
// pairs: as direct, but two neighbouring chunks make one product: fewer and larger ones, of which
// the first waits. Even sizes only. Rank 1 of 4:
//
//   product                    chunks 0, 1                     chunks 2, 3
//   exchange   get 0, give 1   get 3, give 1   get 2, give 1
struct GatherSchedule {
  std::vector<Exchange> exchanges;
  std::vector<ChunkStep> steps;
};
enum class GatherOrder { direct, ring, pairs };
TORCH_OVERLAP_API GatherSchedule gather_schedule(int rank, int size, GatherOrder order);

// A reduce-scatter of partial products: each goes to the rank that sums its rows. Rank 1 of 4:
//
//   product    chunk 2         chunk 3         chunk 0         chunk 1
//   exchange                   give 2 to 2     give 3 to 3     give 0 to 0
//                              part from 0     part from 3     part from 2      then the sum
//
// The own chunk is last: its product hides the last exchange. In exchanges[i] goes what steps[i]
// made; `get` is the own chunk, of which `from` sends its part.
struct ScatterSchedule {
  std::vector<ChunkStep> steps;
  std::vector<Exchange> exchanges;  // one fewer
};
TORCH_OVERLAP_API ScatterSchedule scatter_schedule(int rank, int size);

// A sum over ranks of what each has in memory that the others read, `bytes` of it, which all get.
// One shot: each rank reads all of it from all others. Two shots: each sums its part of it, and
// reads the sums of the others from them. Two ranks read as much either way.
TORCH_OVERLAP_API bool sums_in_one_shot(int64_t bytes, int size);

// How that memory is shared out: what a rank sums at 0, `rows` of row_bytes, and from sums_at on
// sums of the largest part that others take. Where the second begins depends on nothing but the
// size of it all, so that what is summed in one operation is never where sums of another lie.
inline constexpr int64_t kSumAlignment = 128;
inline int64_t direct_sum_room(const RowShare& rows, int64_t row_bytes) {
  const int64_t part = rows.largest() * row_bytes;
  return (rows.size + 1) * ((part + kSumAlignment - 1) / kSumAlignment * kSumAlignment);
}
inline int64_t direct_sums_at(int64_t room, int size) {
  return room / (size + 1) / kSumAlignment * kSumAlignment * size;
}
// Blocks of a kernel that does so, each of which has two flags of its own for each rank.
inline constexpr int kDirectBlocks = 128;

// [0, total) in at most `count` consecutive pieces, none empty, all but the last of one length that
// is a multiple of `multiple`.
struct Piece {
  int64_t begin;
  int64_t length;
  bool operator==(const Piece&) const = default;
};
TORCH_OVERLAP_API std::vector<Piece> pieces(int64_t total, int64_t count, int64_t multiple = 1);

// In which order the products of a pipeline and the exchanges of what they made are issued:
// first_gemm false: G0 R0 G1 R1 G2 R2;  true: G0 G1 R0 G2 R1 R2, so that a product does not queue
// behind an exchange where a device has one queue.
struct PipelineStep {
  bool is_product;
  int piece;
  bool operator==(const PipelineStep&) const = default;
};
TORCH_OVERLAP_API std::vector<PipelineStep> pipeline_order(int count, bool overlap_first_gemm);

}  // namespace torch_overlap
