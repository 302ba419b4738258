#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"

// How the fused operators cut their problem, as values: pure functions of rank, size and rows.
namespace torch_overlap::ops {

// An all-gather in which every chunk comes straight from its owner. Rank 1 of 4:
//
//   step      0        1              2              3
//   GEMM      chunk 1  chunk 0        chunk 3        chunk 2
//   receives  -        0 from rank 0  3 from rank 3  2 from rank 2
//   sends     -        1 to rank 2    1 to rank 3    1 to rank 0
//
// Nothing is forwarded, so all transfers may be started at once, before the first GEMM.
struct GatherStep {
  int chunk;  // whose rows this step's GEMM reads; also the rank that they come from
  int to;     // the rank that gets this rank's rows in this step; this rank itself in step 0
};
TORCH_OVERLAP_API std::vector<GatherStep> gather_schedule(int rank, int size);

// Its dual, a reduce-scatter in which every partial product goes straight to the rank that sums it.
// Rank 1 of 4:
//
//   step      0              1              2              3
//   GEMM      chunk 2        chunk 3        chunk 0        chunk 1
//   sends     2 to rank 2    3 to rank 3    0 to rank 0    -
//   receives  1 from rank 0  1 from rank 3  1 from rank 2  -
//
// The own chunk is last: its GEMM hides the last transfer.
struct ScatterStep {
  int chunk;  // whose rows this step's GEMM writes; also the rank that they go to
  int from;   // the rank whose partial product of this rank's rows arrives in this step
};
TORCH_OVERLAP_API std::vector<ScatterStep> scatter_schedule(int rank, int size);

// [0, rows) in at most `count` consecutive pieces that differ by one row at most, none empty.
struct RowRange {
  int64_t begin;
  int64_t length;
};
TORCH_OVERLAP_API std::vector<RowRange> row_chunks(int64_t rows, int64_t count);

}  // namespace torch_overlap::ops
