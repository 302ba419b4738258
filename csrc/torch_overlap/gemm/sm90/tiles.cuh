#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// How a matrix product is cut: what a block computes at a time, and in which order.
namespace torch_overlap::sm90 {

// Two warpgroups compute a tile of kRows x kColumns: one below the other (kRowGroups 2) or side by
// side (1). `LhsAlongK`, `RhsAlongK`: whether the rows of an operand run along k in memory.
template <typename In_, typename Out_, int kRows_, int kColumns_, int kRowGroups_, bool kLhsAlongK_,
          bool kRhsAlongK_, int kCluster_, int kStages_, int kStoreBuffers_, int kSets_>
struct TileConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kColumnGroups = 2 / kRowGroups;
  static constexpr bool kLhsAlongK = kLhsAlongK_;
  static constexpr bool kRhsAlongK = kRhsAlongK_;
  // Blocks of a cluster compute tiles that lie one below the other, and share what they read of
  // rhs: each loads a part of it for all.
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  // Of 64 x 64 outputs, for each warpgroup.
  static constexpr int kStoreBuffers = kStoreBuffers_;

  static constexpr int kDepth = 128 / In::kBytes;  // of k, in a stage
  static constexpr int kSteps = 4;                 // wgmma along k, 32 bytes each
  static constexpr bool kIsScaled = In::kBytes == 1;
  // What a warpgroup computes: 64 x kWidth.
  static constexpr int kWidth = kColumns / kColumnGroups;
  static constexpr int kAccumulators = kWidth / 2;
  // Of 64 x 64. Where the width is no multiple of 64, the last one begins in the one before: what
  // they share is stored twice, the same.
  static constexpr int kPieces = (kWidth + 63) / 64;
  static constexpr int piece_column(int piece) {
    return piece < kWidth / 64 ? 64 * piece : kWidth - 64;
  }
  // Sets of sums in a thread's registers. With two, a tile begins in one while the outputs of the
  // tile before leave the other.
  static constexpr int kSets = kSets_;

  static constexpr int kLhsBytes = kRows * 128;
  static constexpr int kRhsBytes = kColumns * 128;
  // Where an operand does not lie along k, a stage has blocks of so many of its columns.
  static constexpr int kLhsBlock = 64;
  static constexpr int kRhsBlock = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  static constexpr int kStoreBytes = 64 * 128;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + 2 * kStoreBuffers * kStoreBytes + 1024;
  static constexpr int kThreads = 384;

  static_assert(kRows == 64 * kRowGroups);
  static_assert(kWidth % 64 == 0 || (kWidth % 32 == 0 && kColumnGroups == 1));
  static_assert((kLhsAlongK && kRhsAlongK) || !kIsScaled, "8-bit operands run along k");
  static_assert(kColumns % kRhsBlock == 0);
  static_assert(kSets * kAccumulators <= 192 && kSets <= 2, "the sums of a thread");
  static_assert(kColumns % (8 * kCluster) == 0);
  static_assert(kPieces % kStoreBuffers == 0, "a buffer holds the same pieces of every tile");
};

// Where a matrix like the product is added to it.
enum class Adds { nothing, before_epilogue, behind_epilogue };

// One tile.
struct Unit {
  int row;     // tiles
  int column;  // tiles
  int depth;   // stages of k
  int chunk;   // of the rows, where they come from or go to several places; rows count from its own
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Tile `index` of `rows` x `columns` tiles in groups of rows.
__device__ __forceinline__ Unit tile_at(int index, int rows, int columns, int row_group,
                                        int depth) {
  const int per_group = row_group * columns;
  const int group = index / per_group;
  const int in_group = index % per_group;
  const int height = min(row_group, rows - group * row_group);
  return {group * row_group + in_group % height, in_group / height, depth, 0};
}

// The tiles of this cluster of blocks, every so many-th; row and column are those of this block's
// part.
class UnitList {
 public:
  template <typename Config>
  static __device__ __forceinline__ UnitList of(const GemmParams& p) {
    UnitList list;
    list.rows_ = ceil_div(p.m, Config::kRows * Config::kCluster);
    list.columns_ = ceil_div(p.n, Config::kColumns);
    list.depth_ = ceil_div(p.k, Config::kDepth);
    list.row_group_ = p.row_group;
    list.rank_ = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
    list.cluster_ = Config::kCluster;
    list.next_ = static_cast<int>(blockIdx.x) / Config::kCluster;
    return list;
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (next_ >= rows_ * columns_) return false;
    unit = tile_at(next_, rows_, columns_, row_group_, depth_);
    unit.row = unit.row * cluster_ + rank_;
    next_ += static_cast<int>(gridDim.x) / cluster_;
    return true;
  }

 private:
  int rows_, columns_, depth_, row_group_, rank_, cluster_, next_;
};

}  // namespace torch_overlap::sm90
