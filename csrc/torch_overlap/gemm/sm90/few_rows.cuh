#pragma once

#include <algorithm>
#include <cstdint>

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/multiplier.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// The product of few rows, which is bound by reading the weight: it is computed as its transpose,
// weight [n, k] * rows^T, so that features fill the 64 rows of an instruction and the rows of the
// product are its columns. A block computes one tile of features for all rows, or two blocks, a
// cluster, do, half of k each.
//
//   last warpgroup, one thread   loads |W0 X0|W1 X1|W2 X2| ...    as far as there are stages
//   the others                   multiply 64 features each         registers: 64 x rows
//
// Blocks that shared what they read of the rows, in clusters, were slower, and so were two that
// share a tile where there are as many tiles as SMs, but for tiles of 256 rows.
namespace torch_overlap::sm90 {

template <typename In_, typename Out_, int kRows_, int kGroups_, int kSplit_, bool kWeightAlongK_>
struct FewRowsConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;      // of the product, at most
  static constexpr int kGroups = kGroups_;  // warpgroups that multiply, 64 features each
  static constexpr int kSplit = kSplit_;    // blocks of a cluster, which share a tile along k
  static constexpr bool kWeightAlongK = kWeightAlongK_;
  static constexpr int kFeatures = 64 * kGroups;
  static constexpr int kMultipliers = 128 * kGroups;  // threads, the first ones
  static constexpr int kThreads = kMultipliers + 128;
  static constexpr int kDepth = 128 / In::kBytes;  // of k, in a stage
  static constexpr int kSteps = 4;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kStages = std::min(24, (kSharedBytesOfBlock - 2048) / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
  static constexpr int kAccumulators = kRows / 2;
  // Of the rows that are this block's in the end.
  static constexpr int kOwnRows = kRows / kSplit;
  static constexpr int kOwnSums = kOwnRows / 2;

  static_assert(kSplit == 1 || kSplit == 2);
  static_assert(kOwnRows % 16 == 0);
  // What the other half of the cluster sends, and the outputs, lie where stages were.
  static constexpr int kGivenBytes = kSplit == 1 ? 0 : kOwnSums * 4 * kMultipliers;
};

// Where a block is in its cluster, and which tile it computes.
template <typename Config>
struct FewRowsPlace {
  int part;     // of k
  int feature;  // of the tile
  int first;    // stages of k
  int count;
  __device__ __forceinline__ explicit FewRowsPlace(const FewRowsParams& p) {
    const int block = static_cast<int>(blockIdx.x);
    part = block % Config::kSplit;
    feature = block / Config::kSplit * Config::kFeatures;
    const int each = (p.stages + Config::kSplit - 1) / Config::kSplit;
    first = part * each;
    count = min(each, p.stages - first);
  }
};

template <typename Config>
__device__ __forceinline__ void init_few_rows(SharedBarriers<Config>& barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      barrier_init(shared_address(&barriers.full[i]), 1);
      barrier_init(shared_address(&barriers.empty[i]), 4 * Config::kGroups);
    }
    fence_barrier_init();
  }
  if constexpr (Config::kSplit > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

// Of one thread.
template <typename Config>
__device__ __forceinline__ void load_few_rows(const FewRowsParams& p,
                                              const FewRowsPlace<Config>& place, uint32_t shared,
                                              SharedBarriers<Config>& barriers) {
  StageCursor<Config::kStages> at;
  for (int i = 0; i < place.count; ++i, at.advance()) {
    barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
    const uint32_t full = shared_address(&barriers.full[at.stage]);
    const uint32_t to = shared + at.stage * Config::kStageBytes;
    const int depth = (place.first + i) * Config::kDepth;
    barrier_expect(full, Config::kStageBytes);
    if constexpr (Config::kWeightAlongK) {
      tensor_load(to, &p.weight, full, depth, place.feature);
    } else {
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group) {
        tensor_load(to + group * 64 * 128, &p.weight, full, place.feature + 64 * group, depth);
      }
    }
    tensor_load(to + Config::kWeightBytes, &p.rows, full, depth, 0);
  }
}

// Of a warpgroup. The sums are complete afterwards, of this block's part of k.
template <typename Config>
__device__ __forceinline__ void multiply_few_rows(const FewRowsPlace<Config>& place,
                                                  uint32_t shared, SharedBarriers<Config>& barriers,
                                                  float (&sums)[Config::kAccumulators]) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(shared_address(&barriers.empty[stage]));
  };
  StageCursor<Config::kStages> at;
  const auto begin = [&](bool adds) __attribute__((always_inline)) {
    const int stage = at.stage;
    barrier_wait(shared_address(&barriers.full[stage]), at.phase);
    at.advance();
    const uint32_t weight = shared + stage * Config::kStageBytes + group * 64 * 128;
    const uint32_t rows = shared + stage * Config::kStageBytes + Config::kWeightBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const uint64_t lhs = Config::kWeightAlongK ? descriptor_k(weight + step * 32)
                                                 : descriptor_mn<64>(weight + step * 64 * 32);
      wgmma<!Config::kWeightAlongK, 0>(typename Config::In{}, Columns<Config::kRows>{}, sums, lhs,
                                       descriptor_k(rows + step * 32), adds || step > 0);
    }
    wgmma_commit();
    return stage;
  };
  int before = begin(false);
  for (int i = 1; i < place.count; ++i) {
    const int stage = begin(true);
    wgmma_wait<1>();
    release(before);
    before = stage;
  }
  wgmma_wait<0>();
  hold(sums);
}

}  // namespace torch_overlap::sm90
