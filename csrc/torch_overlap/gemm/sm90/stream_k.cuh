#pragma once

#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/params.h"

// Products whose tiles are no whole number of waves. Tiles of the last two waves (all, where there
// is not one wave) lie in a row, stage of k after stage of k, and every cluster takes an equal
// piece of that row; then the other tiles, one a cluster as usual. Where there are so few tiles
// that each can have a number of clusters to itself, each is a row of its own. This is Stream-K, in
// its form "two-tile Stream-K with data-parallel tiles": Osama, Merrill, Cecka, Garland, Owens,
// "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the
// GPU", PPoPP 2023.
//
//   cluster 0   |tile 3 ..........|tile 4 ...   tile 0 ..........|
//   cluster 1   ......|tile 5 ..........|tile 6 tile 1 ..........|
//   cluster 2   ............|tile 7 ..........| tile 2 ..........|
//
// Where a tile is cut, each of its parts leaves its sums in memory, but for the last one to be
// done, which adds them all up in the order of k, whichever part it is: the same bits in every run.
// A warp's rows of a tile are a matter between that warp and its namesakes in other blocks: each
// looks how many have come, writes its sums unless it is the last, and then counts itself.
// The stores of a part behind which its cluster goes on to other tiles are not waited for: it is
// counted when the next products are under way, and should it be the last all the same, its cluster
// completes the tile in the end, from memory.
//
//   nobody waits      no block needs another one to run at the same time, whatever else is on the
//                     GPU, in whichever order blocks begin, and however few SMs there are
//   sums are there    a warp's stores come before its count (release by one lane, behind a barrier
//                     of the warp), all counts before the last one's loads (acquire, then a barrier
//                     of the warp), which go to L2
//   one is the last   who finds all others counted, or counts behind all of them, and then no other
//                     one looks again: it sets the count back to 0
//   the next kernel   finds zeros, and writes over nothing that is still read: kernels of one
//                     stream, or of one branch of a graph, come one after the other. Other streams
//                     and captured calls have other memory for sums (cublaslt/workspace.h) and
//                     counts (arrivals.h)
//   other kernels     may use the memory of sums in between: only what was written by the same
//                     kernel is read. Counts have no other use
namespace torch_overlap::sm90 {

__device__ __forceinline__ int first_stage(const StreamKParams& p, int cluster) {
  const int row = cluster / p.row_clusters;
  const int inside = cluster % p.row_clusters;
  return row * p.row_stages + inside * p.share + min(inside, p.rest);
}

// Who has this stage.
__device__ __forceinline__ int cluster_of(const StreamKParams& p, int stage) {
  const int row = stage / p.row_stages;
  const int inside = stage % p.row_stages;
  const int longer = p.rest * (p.share + 1);
  return row * p.row_clusters +
         (inside < longer ? inside / (p.share + 1) : p.rest + (inside - longer) / p.share);
}

// Of this cluster: its piece of the row, then whole tiles.
template <typename Config>
class StreamKUnits {
 public:
  explicit __device__ __forceinline__ StreamKUnits(const StreamKParams& p)
      : p_(p), stage_(first_stage(p, cluster())), next_(cluster()) {}

  __device__ __forceinline__ bool next(Unit& unit) {
    const int end = first_stage(p_, cluster() + 1);
    if (stage_ < end) {
      const int tile = stage_ / p_.depth;
      const int begin = stage_ - tile * p_.depth;
      unit = tile_of(p_.whole_tiles + tile, min(p_.depth - begin, end - stage_));
      unit.begin = begin;
      unit.place = tile * p_.depth;
      stage_ += unit.depth;
      return true;
    }
    if (next_ >= p_.whole_tiles) return false;
    unit = tile_of(next_, p_.depth);
    next_ += static_cast<int>(gridDim.x) / Config::kCluster;
    return true;
  }

  static __device__ __forceinline__ int cluster() {
    return static_cast<int>(blockIdx.x) / Config::kCluster;
  }
  static __device__ __forceinline__ int rank() {
    return Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  }

 private:
  __device__ __forceinline__ Unit tile_of(int index, int depth) const {
    Unit unit = tile_at(index, p_.rows, p_.columns, p_.gemm.row_group, depth);
    unit.row = unit.row * Config::kCluster + rank();
    return unit;
  }

  const StreamKParams& p_;
  int stage_;
  int next_;  // of the whole tiles
};

// `kLate`: parts that are hardly ever the last are counted when the next products are under way.
template <typename Config, bool kLate>
struct StreamKWork {
  static constexpr bool kCountsLate = kLate;
  static constexpr int kSums = Config::kAccumulators;
  static constexpr int kWarpVectors = kSums / 4 * 32;  // of four sums

  const StreamKParams& p;
  bool has_to_count = false;
  uint32_t before = 0;  // the first lane's: how many had come before the part that was counted late

  __device__ __forceinline__ StreamKUnits<Config> units(const GemmParams&) {
    return StreamKUnits<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const Unit&, int&) { return &p.gemm.lhs; }
  __device__ __forceinline__ const float* lhs_scale(const Unit&, int& rows) const {
    rows = p.gemm.m;
    return p.gemm.epilogue.lhs_scale;
  }
  __device__ __forceinline__ void store(const Unit&, uint32_t from, int column, int row) {
    tensor_store(&p.gemm.out, from, column, row);
  }

  // Each warp by itself.
  __device__ __forceinline__ bool join(const Unit& unit, int row, float (&sums)[kSums]) {
    if (unit.depth == p.depth || row >= p.gemm.m) return true;  // whole, or nothing to be stored
    // The cluster that has the first part of this tile has that of no other one.
    const int first = cluster_of(p, unit.place);
    const int parts = cluster_of(p, unit.place + p.depth - 1) - first + 1;
    const int part = StreamKUnits<Config>::cluster() - first;
    if (is_early(part)) {
      write(sums_of(first, part), sums);
      has_to_count = true;
      return false;
    }
    const bool counts = threadIdx.x % 32 == 0;
    uint32_t* const arrived = p.arrived + warp_of(first);
    const auto others = static_cast<uint32_t>(parts - 1);
    uint32_t come = 0;
    if (counts) come = load_acquire(arrived);
    come = of_first_lane(come);
    if (come != others || part > 1) write(sums_of(first, part), sums);
    if (come != others) {
      __syncwarp();
      if (counts) come = add_and_acquire(arrived, 1);
      if (of_first_lane(come) != others) return false;
    }
    if (counts) *arrived = 0;
    add_up(first, part, parts, sums);
    return true;
  }

  // When the first products behind an early part are under way: its sums have left the registers by
  // then, and most of the time that they take to memory is over.
  __device__ __forceinline__ void count() {
    if (!has_to_count) return;
    has_to_count = false;
    __syncwarp();
    if (threadIdx.x % 32 == 0) before = add_and_acquire(p.arrived + warp_of(before_this()), 1);
    __syncwarp();
  }

  // Behind all units: whether the early part was the last to come all the same. Then this is its
  // tile, as a whole.
  __device__ __forceinline__ bool is_last() const { return of_first_lane(before) != 0; }
  __device__ __forceinline__ void take(Unit& unit, float (&sums)[kSums]) {
    if (threadIdx.x % 32 == 0) p.arrived[warp_of(before_this())] = 0;
    (void)units(p.gemm).next(unit);
    unit.depth = p.depth;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = -0.0F;
    add_all<2>(before_this(), sums);
  }

 private:
  // Where there are two waves, the second of the two parts of a tile is the first thing that its
  // cluster computes, and other tiles are behind it: it hardly ever comes last.
  __device__ __forceinline__ bool is_early(int part) const {
    return kLate && part > 0 && p.share >= p.depth;
  }
  // Who has the other part of its tile.
  static __device__ __forceinline__ int before_this() {
    return StreamKUnits<Config>::cluster() - 1;
  }
  // Also what the first lane has acquired is seen by all.
  static __device__ __forceinline__ uint32_t of_first_lane(uint32_t value) {
    const uint32_t result = __shfl_sync(0xffffffff, value, 0);
    __syncwarp();
    return result;
  }
  // This warp, where each cluster, or part of a tile, has all its warps.
  static __device__ __forceinline__ int warp_of(int place) {
    return (place * Config::kCluster + StreamKUnits<Config>::rank()) * kMultiplyingWarps +
           static_cast<int>(threadIdx.x) / 32 - 4;
  }
  // This lane's sums of a part: four at a time, next to those of the next lane. At the border
  // behind cluster c lie those of a first part of c and of another part of c + 1.
  __device__ __forceinline__ float4* sums_of(int first, int part) const {
    const int place = part == 0 ? 2 * first : 2 * (first + part) - 1;
    return reinterpret_cast<float4*>(p.sums) + static_cast<int64_t>(warp_of(place)) * kWarpVectors +
           threadIdx.x % 32;
  }

  static __device__ __forceinline__ void write(float4* to, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      __stcg(to + 32 * i,
             make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
  }
  template <int n>
  static __device__ __forceinline__ void add(const float4* from, float* sums) {
    float4 others[n];
#pragma unroll
    for (int i = 0; i < n; ++i) others[i] = __ldcg(from + 32 * i);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      sums[4 * i] += others[i].x;
      sums[4 * i + 1] += others[i].y;
      sums[4 * i + 2] += others[i].z;
      sums[4 * i + 3] += others[i].w;
    }
  }
  template <int parts>
  __device__ __forceinline__ void add_all(int first, float (&sums)[kSums]) const {
#pragma unroll
    for (int one = 0; one < parts; ++one) {
      const float4* const from = sums_of(first, one);
#pragma unroll
      for (int i = 0; i < kSums / 4; i += 4) add<4>(from + 32 * i, sums + 4 * i);
    }
  }
  // In the order of k; of the first two in either order. Those of a part behind them are in memory,
  // and are taken from there in their turn.
  __device__ __forceinline__ void add_up(int first, int part, int parts,
                                         float (&sums)[kSums]) const {
    constexpr int kAtOnce = 8;
    if (part > 1) {
#pragma unroll
      for (float& sum : sums) sum = -0.0F;  // which changes nothing that is added to it
    }
    for (int one = 0; one < parts; ++one) {
      if (one == part && part <= 1) continue;
      const float4* const from = sums_of(first, one);
#pragma unroll
      for (int i = 0; i < kSums / 4; i += kAtOnce) add<kAtOnce>(from + 32 * i, sums + 4 * i);
    }
  }
};

}  // namespace torch_overlap::sm90
