#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// Partition of a GEMM into tiles, and the order in which a block computes them.
namespace torch_overlap::sm90 {

// Two warpgroups compute a tile of kRows x kColumns: one below the other (kRowGroups 2) or side by
// side (1). `kIsLhsKMajor`, `kIsRhsKMajor`: true if k is the operand's contiguous dimension in
// memory.
template <typename In_, typename Out_, int kRows_, int kColumns_, int kRowGroups_,
          bool kIsLhsKMajor_, bool kIsRhsKMajor_, int kCluster_, int kStages_, int kStoreBuffers_,
          int kNumAccumulatorSets_>
struct TileConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kColumnGroups = 2 / kRowGroups;
  static constexpr bool kIsLhsKMajor = kIsLhsKMajor_;
  static constexpr bool kIsRhsKMajor = kIsRhsKMajor_;
  // Blocks of a cluster compute vertically adjacent tiles, and share rhs: each loads a part of it
  // for all.
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  // Buffers of 64 x 64 outputs per warpgroup.
  static constexpr int kStoreBuffers = kStoreBuffers_;

  static constexpr int kDepth = 128 / In::kBytes;  // elements of k per stage
  static constexpr int kSteps = 4;                 // wgmma instructions along k, 32 bytes each
  static constexpr bool kIsScaled = In::kBytes == 1;
  // A warpgroup computes 64 x kWidth outputs.
  static constexpr int kWidth = kColumns / kColumnGroups;
  static constexpr int kAccumulators = kWidth / 2;
  // Number of 64 x 64 pieces of a warpgroup's outputs. If the width is not a multiple of 64, the
  // last piece overlaps the one before it; the overlap is stored twice with the same values.
  static constexpr int kPieces = (kWidth + 63) / 64;
  static constexpr int piece_column(int piece) {
    return piece < kWidth / 64 ? 64 * piece : kWidth - 64;
  }
  // Sets of accumulators in a thread's registers. With two, a tile starts in one set while the
  // outputs of the previous tile leave the other.
  static constexpr int kNumAccumulatorSets = kNumAccumulatorSets_;

  static constexpr int kLhsBytes = kRows * 128;
  static constexpr int kRhsBytes = kColumns * 128;
  // Columns per block of an operand that is not K-major in a stage.
  static constexpr int kLhsBlock = 64;
  static constexpr int kRhsBlock = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  static constexpr int kStoreBytes = 64 * 128;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + 2 * kStoreBuffers * kStoreBytes + 1024;
  static constexpr int kThreads = 384;

  static_assert(kRows == 64 * kRowGroups);
  static_assert(kWidth % 64 == 0 || (kWidth % 32 == 0 && kColumnGroups == 1));
  static_assert((kIsLhsKMajor && kIsRhsKMajor) || !kIsScaled, "8-bit operands run along k");
  static_assert(kColumns % kRhsBlock == 0);
  static_assert(kNumAccumulatorSets * kAccumulators <= 192 && kNumAccumulatorSets <= 2,
                "the sums of a thread");
  static_assert(kColumns % (8 * kCluster) == 0);
  static_assert(kPieces % kStoreBuffers == 0, "a buffer holds the same pieces of every tile");
};

// Position at which addends (matrices like the result) are added.
enum class AddendPosition { none, before_epilogue, after_epilogue };

// One tile.
struct WorkTile {
  int row;     // in tiles
  int column;  // in tiles
  int depth;   // number of stages of k
  int chunk;   // of the rows, if they have several sources or destinations; `row` is relative to it
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns tile `index` of `rows` x `columns` tiles, in groups of `row_group` rows of tiles.
__device__ __forceinline__ WorkTile tile_for_index(int index, int rows, int columns, int row_group,
                                                   int depth) {
  const int per_group = row_group * columns;
  const int group = index / per_group;
  const int in_group = index % per_group;
  const int height = min(row_group, rows - group * row_group);
  return {group * row_group + in_group % height, in_group / height, depth, 0};
}

// The tiles of this cluster: every n-th of them, n being the number of clusters. Row and column are
// those of this block's part.
class TileScheduler {
 public:
  template <typename Config>
  static __device__ __forceinline__ TileScheduler of(const GemmParams& p) {
    TileScheduler list;
    list.rows_ = ceil_div(p.m, Config::kRows * Config::kCluster);
    list.columns_ = ceil_div(p.n, Config::kColumns);
    list.depth_ = ceil_div(p.k, Config::kDepth);
    list.row_group_ = p.row_group;
    list.rank_ = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
    list.cluster_ = Config::kCluster;
    list.next_ = static_cast<int>(blockIdx.x) / Config::kCluster;
    return list;
  }

  __device__ __forceinline__ bool next(WorkTile& work_tile) {
    if (next_ >= rows_ * columns_) return false;
    work_tile = tile_for_index(next_, rows_, columns_, row_group_, depth_);
    work_tile.row = work_tile.row * cluster_ + rank_;
    next_ += static_cast<int>(gridDim.x) / cluster_;
    return true;
  }

 private:
  int rows_, columns_, depth_, row_group_, rank_, cluster_, next_;
};

}  // namespace torch_overlap::sm90
