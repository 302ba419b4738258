#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// How a matrix product is cut: what a block computes at a time, and in which order.
namespace torch_overlap::sm90 {

// Two warpgroups compute a tile of kRows x kColumns: one below the other (kRowGroups 2) or side by
// side (1). `LhsAlongK`: whether the rows of the operand in memory run along k.
template <typename In_, typename Out_, int kElementBytes_, int kRows_, int kColumns_,
          int kRowGroups_, bool kLhsAlongK_, bool kRhsAlongK_, int kCluster_, int kStages_,
          int kStoreBuffers_>
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

  static constexpr int kDepth = 128 / kElementBytes_;  // of k, in a stage
  static constexpr int kSteps = 4;                     // wgmma along k, 32 bytes each
  // What a warpgroup computes: kRepeats products of 64 x kWidth.
  static constexpr int kRepeats = kRows / kRowGroups / 64;
  static constexpr int kWidth = kColumns / kColumnGroups;
  static constexpr int kAccumulators = kWidth / 2;
  static constexpr int kChunks = kWidth / 64;  // of 64 columns

  static constexpr int kLhsBytes = kRows * 128;
  static constexpr int kRhsBytes = kColumns * 128;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  static constexpr int kStoreBytes = 64 * 128;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + 2 * kStoreBuffers * kStoreBytes + 1024;
  static constexpr int kThreads = 384;

  static_assert(kRows % (64 * kRowGroups) == 0 && kWidth % 64 == 0);
  static_assert(kRepeats * kAccumulators <= 128, "the accumulators of a thread");
  static_assert(kColumns % ((kRhsAlongK ? 8 : 64) * kCluster) == 0);
  static_assert(kRepeats * kChunks % kStoreBuffers == 0);
};

// A part of the k of one tile.
struct Unit {
  int row;     // tiles
  int column;  // tiles
  int begin;   // stages of k
  int end;
  int chunk;  // of the rows, where they come from or go to several places; rows count from its own
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Tile `index` of `rows` x `columns` tiles in groups of rows.
__device__ __forceinline__ Unit tile_at(int index, int rows, int columns, int row_group,
                                        int depth) {
  const int per_group = row_group * columns;
  const int group = index / per_group;
  const int in_group = index % per_group;
  const int height = min(row_group, rows - group * row_group);
  return {group * row_group + in_group % height, in_group / height, 0, depth, 0};
}

// The units of this cluster of blocks: first its part of the tiles that are shared, then whole
// tiles. A tile here is what the cluster computes; row and column are those of this block's part of
// it.
//
//   shared tiles    |  0  |  1  |  2  |  3  |      stages of k, one tile after the other
//   cluster         |  5   |  4   |  3   | ...     equal parts
//   whole tiles     4: cluster 0    5: cluster 1   ...
//
// Who has the first stages of a tile finishes it, with the parts of those that have the rest. They
// have lower numbers, so they were started before it, and do that part first of all.
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
    list.clusters_ = static_cast<int>(gridDim.x) / Config::kCluster;
    const int mine = static_cast<int>(blockIdx.x) / Config::kCluster;
    list.next_ = p.shared_tiles + mine;
    list.stages_ = p.shared_tiles * list.depth_;
    list.parts_ = min(list.stages_, list.clusters_);
    list.part_ = list.parts_ - 1 - mine;
    list.at_ = list.part_ < 0 ? 0 : list.begin_of(list.part_);
    list.end_ = list.part_ < 0 ? 0 : list.begin_of(list.part_ + 1);
    return list;
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (at_ < end_) {
      const int tile = at_ / depth_;
      const int begin = at_ - tile * depth_;
      const int length = min(depth_ - begin, end_ - at_);
      set_tile(unit, tile);
      unit.begin = begin;
      unit.end = begin + length;
      at_ += length;
      return true;
    }
    if (next_ >= rows_ * columns_) return false;
    set_tile(unit, next_);
    next_ += clusters_;
    return true;
  }

  __device__ __forceinline__ bool is_whole(const Unit& unit) const {
    return unit.begin == 0 && unit.end == depth_;
  }
  // How many parts, those before this one's, hold the rest of the tile whose first stages, up to
  // where next() has come, are in this one.
  __device__ __forceinline__ int helpers(const Unit& unit) const {
    const int end = at_ - unit.end + depth_;
    int count = 0;
    while (part_ + 1 + count < parts_ && begin_of(part_ + 1 + count) < end) ++count;
    return count;
  }
  // The block of such a part that has the same place in its cluster as this one: 1 is the nearest.
  __device__ __forceinline__ int helper(int number) const {
    return static_cast<int>(blockIdx.x) - number * cluster_;
  }

 private:
  // Of the stages of all shared tiles, of which there are few.
  __device__ __forceinline__ int begin_of(int part) const {
    return static_cast<int>(static_cast<int64_t>(stages_) * part / parts_);
  }
  __device__ __forceinline__ void set_tile(Unit& unit, int index) const {
    unit = tile_at(index, rows_, columns_, row_group_, depth_);
    unit.row = unit.row * cluster_ + rank_;
  }
  int rows_, columns_, depth_, row_group_, rank_, cluster_, clusters_, next_, parts_, part_,
      stages_, at_, end_;
};

}  // namespace torch_overlap::sm90
