#pragma once

#include <algorithm>
#include <cstdint>

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/mma_pipeline.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// GEMM with few rows, which is bound by reading the weight. It is computed as its transpose, weight
// [n, k] * rows^T, so that features fill the 64 rows of an instruction, and the rows of the result
// are its columns. A block computes a tile of features for all rows; with kSplitK, a cluster of
// that many blocks does, each over a part of k.
//
//   one thread     loads |W0 X0|W1 X1|W2 X2| ...    as far ahead as there are stages
//   warpgroups     multiply 64 features each        registers: 64 x rows
//
// Sharing the loads of the rows within clusters is slower. So is splitting k once the number of
// tiles reaches the number of SMs, except for tiles of 256 rows.
namespace torch_overlap::sm90 {

template <typename In_, typename Out_, int kRows_, int kNumMmaWarpgroups_, int kSplitK_,
          bool kIsWeightKMajor_>
struct SmallMConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;  // maximum number of rows of the result
  static constexpr int kNumMmaWarpgroups =
      kNumMmaWarpgroups_;                   // warpgroups that multiply 64 features each
  static constexpr int kSplitK = kSplitK_;  // blocks of a cluster that share a tile along k
  static constexpr bool kIsWeightKMajor = kIsWeightKMajor_;
  static constexpr int kFeatures = 64 * kNumMmaWarpgroups;
  static constexpr int kNumMmaThreads = 128 * kNumMmaWarpgroups;  // the first threads of the block
  static constexpr int kThreads = kNumMmaThreads + 128;
  static constexpr int kDepth = 128 / In::kBytes;  // elements of k per stage
  static constexpr int kSteps = 4;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kStages = std::min(24, (kMaxSharedBytes - 2048) / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
  static constexpr int kAccumulators = kRows / 2;
  // Rows that this block stores in the end.
  static constexpr int kLocalRows = kRows / kSplitK;
  static constexpr int kNumLocalAccumulators = kLocalRows / 2;

  static_assert(kSplitK == 1 || kSplitK == 2);
  static_assert(kLocalRows % 16 == 0);
  // Data from the other block of the cluster, and the outputs, reuse the memory of the stages.
  static constexpr int kExchangeBytes =
      kSplitK == 1 ? 0 : kNumLocalAccumulators * 4 * kNumMmaThreads;
};

// Position of a block in its cluster, and the tile that it computes.
template <typename Config>
struct SmallMTile {
  int part;     // part of k
  int feature;  // first feature of the tile
  int first;    // first stage of k
  int count;
  __device__ __forceinline__ explicit SmallMTile(const SmallMParams& p) {
    const int block = static_cast<int>(blockIdx.x);
    part = block % Config::kSplitK;
    feature = block / Config::kSplitK * Config::kFeatures;
    const int each = (p.stages + Config::kSplitK - 1) / Config::kSplitK;
    first = part * each;
    count = min(each, p.stages - first);
  }
};

template <typename Config>
__device__ __forceinline__ void init_small_m(SharedBarriers<Config>& barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      barrier_init(shared_address(&barriers.full[i]), 1);
      barrier_init(shared_address(&barriers.empty[i]), 4 * Config::kNumMmaWarpgroups);
    }
    fence_barrier_init();
  }
  if constexpr (Config::kSplitK > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

// Load stage i of this block's part of k to `to`; `full` counts the bytes. They run on one thread.
template <typename Config>
__device__ __forceinline__ void load_weight(const SmallMParams& p, const SmallMTile<Config>& place,
                                            int i, uint32_t to, uint32_t full) {
  const int depth = (place.first + i) * Config::kDepth;
  if constexpr (Config::kIsWeightKMajor) {
    tma_load_2d(to, &p.weight, full, depth, place.feature);
  } else {
#pragma unroll
    for (int group = 0; group < Config::kNumMmaWarpgroups; ++group) {
      tma_load_2d(to + group * 64 * 128, &p.weight, full, place.feature + 64 * group, depth);
    }
  }
}
template <typename Config>
__device__ __forceinline__ void load_rows(const SmallMParams& p, const SmallMTile<Config>& place,
                                          int i, uint32_t to, uint32_t full) {
  tma_load_2d(to + Config::kWeightBytes, &p.rows, full, (place.first + i) * Config::kDepth, 0);
}

// Loads both to the next stage in shared memory, once it is empty.
template <typename Config>
__device__ __forceinline__ void load_stage(const SmallMParams& p, const SmallMTile<Config>& place,
                                           int i, uint32_t shared, SharedBarriers<Config>& barriers,
                                           PipelineState<Config::kStages>& at) {
  barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
  const uint32_t full = shared_address(&barriers.full[at.stage]);
  const uint32_t to = shared + at.stage * Config::kStageBytes;
  barrier_arrive_expect_tx(full, Config::kStageBytes);
  load_weight<Config>(p, place, i, to, full);
  load_rows<Config>(p, place, i, to, full);
  at.advance();
}

// Runs on one thread.
template <typename Config>
__device__ __forceinline__ void load_small_m(const SmallMParams& p, const SmallMTile<Config>& place,
                                             uint32_t shared, SharedBarriers<Config>& barriers) {
  PipelineState<Config::kStages> at;
  for (int i = 0; i < place.count; ++i) load_stage<Config>(p, place, i, shared, barriers, at);
}

// Runs on a warpgroup, for the stages from `at` on. Afterwards the sums over this block's part of k
// are complete.
template <typename Config>
__device__ __forceinline__ void multiply_small_m(const SmallMTile<Config>& place, uint32_t shared,
                                                 SharedBarriers<Config>& barriers,
                                                 PipelineState<Config::kStages>& at,
                                                 float (&sums)[Config::kAccumulators]) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(shared_address(&barriers.empty[stage]));
  };
  const auto begin = [&](bool adds) __attribute__((always_inline)) {
    const int stage = at.stage;
    barrier_wait(shared_address(&barriers.full[stage]), at.phase);
    at.advance();
    const uint32_t weight = shared + stage * Config::kStageBytes + group * 64 * 128;
    const uint32_t rows = shared + stage * Config::kStageBytes + Config::kWeightBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const uint64_t lhs = Config::kIsWeightKMajor
                               ? make_k_major_descriptor(weight + step * 32)
                               : make_mn_major_descriptor<64>(weight + step * 64 * 32);
      wgmma<!Config::kIsWeightKMajor, 0>(typename Config::In{}, WgmmaN<Config::kRows>{}, sums, lhs,
                                         make_k_major_descriptor(rows + step * 32),
                                         adds || step > 0);
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
  warpgroup_fence_operand(sums);
  release(before);
}

}  // namespace torch_overlap::sm90
