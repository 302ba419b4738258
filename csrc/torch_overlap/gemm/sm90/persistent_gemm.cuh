#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/epilogue_writer.cuh"
#include "torch_overlap/gemm/sm90/mma_pipeline.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tile_scheduler.cuh"

// A persistent GEMM for Hopper. One block per SM, three warpgroups:
//
//   0     producer: one thread loads the stages of both operands by TMA, as far ahead as shared
//         memory allows, across tile boundaries; another one loads the addends of outputs
//   1, 2  consumers: each multiplies its part of the tile from shared memory into registers (wgmma)
//         and applies the epilogue; while the next tile is computed, 64 x 64 outputs at a time
//         go to shared memory, from where each warp stores its rows by TMA
//
// Every stage has two mbarriers: `full` counts the bytes that have arrived, `empty` the eight warps
// that have finished reading. The structure is that of CUTLASS's warp-specialized cooperative
// kernels and of DeepGEMM.
//
// GemmPolicy holds what differs between the plain GEMM and those that communicate with other ranks:
//   units(p)                   scheduler of this block's tiles, iterated by next()
//   lhs(tile, &row)            tensor map of the rows of lhs; may change `row` to the map's rows
//   kWaitsForPeers             true if rows of lhs may not have arrived yet; then:
//     watch()                  waits for them, on a warp of its own
//     await(tile, k)           called by the thread that loads: waits for, and returns, the
//                              number of stages of k of the tile that have arrived, more than k
//     on_tile_loaded(tile)     called by that thread after the last stage of a tile
//     end()                    called by that thread after the last tile
//   lhs_scale(tile, &rows)     scales of the rows to which tile.row is relative, and their number
//   store(tile, from, column, row)   stores 16 x 64 outputs
//   kAddendPosition            whether addends (matrices like the result) are added, before the
//                              epilogue or after it; then:
//     addends()                number of addends, at least one
//     addend(tile, i)          tensor map of one, in boxes of 64 x 64; called by the thread that
//                              loads it, and waits until the addend's part of the tile arrives
//     factor()                 before the epilogue: factor of the sum
namespace torch_overlap::sm90 {

// Loads this block's rows of lhs, which no other block reads.
template <typename Config>
__device__ __forceinline__ void load_lhs(uint32_t to, const CUtensorMap* lhs, uint32_t full,
                                         int depth, int row) {
  if constexpr (Config::kIsLhsKMajor) {
    tma_load_2d(to, lhs, full, depth, row);
  } else {
#pragma unroll
    for (int first = 0; first < Config::kRows; first += Config::kLhsBlock) {
      tma_load_2d(to + first * 128, lhs, full, row + first, depth);
    }
  }
}

// Loads this block's part of rhs, and multicasts it to all blocks of the cluster. K-major: an equal
// share of the columns. Otherwise: every kCluster-th block of columns.
template <typename Config>
__device__ __forceinline__ void load_rhs(const GemmParams& p, uint32_t to, uint32_t full, int depth,
                                         int column) {
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const auto load = [&](int offset, int x, int y) {
    if constexpr (Config::kCluster == 1) {
      tma_load_2d(to + offset * 128, &p.rhs, full, x, y);
    } else {
      tma_load_2d_multicast(to + offset * 128, &p.rhs, full, x, y, (1 << Config::kCluster) - 1);
    }
  };
  if constexpr (Config::kIsRhsKMajor) {
    const int first = rank * (Config::kColumns / Config::kCluster);
    load(first, depth, column + first);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kColumns / Config::kRhsBlock; ++i) {
      const int first = Config::kRhsBlock * i;
      if (i % Config::kCluster == rank) load(first, column + first, depth);
    }
  }
}

template <typename Config, typename GemmPolicy>
__device__ __forceinline__ void load_tiles(const GemmParams& p, GemmPolicy& policy, uint32_t shared,
                                           SharedBarriers<Config>& barriers) {
  PipelineState<Config::kStages> at;
  auto units = policy.units(p);
  WorkTile work_tile;
  while (units.next(work_tile)) {
    int row = work_tile.row * Config::kRows;
    const int column = work_tile.column * Config::kColumns;
    const CUtensorMap* const lhs = policy.lhs(work_tile, row);
    int k = 0;
    const auto load_to = [&](int end) {
      for (; k < end; ++k, at.advance()) {
        barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
        const uint32_t full = shared_address(&barriers.full[at.stage]);
        const uint32_t to = shared + at.stage * Config::kStageBytes;
        const int depth = k * Config::kDepth;
        barrier_arrive_expect_tx(full, Config::kStageBytes);
        load_lhs<Config>(to, lhs, full, depth, row);
        load_rhs<Config>(p, to + Config::kLhsBytes, full, depth, column);
      }
    };
    if constexpr (GemmPolicy::kWaitsForPeers) {
      while (k < work_tile.depth) load_to(policy.await(work_tile, k));
      policy.on_tile_loaded(work_tile);
    } else {
      load_to(work_tile.depth);
    }
  }
  if constexpr (GemmPolicy::kWaitsForPeers) policy.end();
}

// Main loop of a consumer warpgroup, over its tiles. `TileOutput` handles the sums of each tile:
//   complete(tile, sums)            all MMAs of the tile are done
//   kPrefetchesAddends, fetch()     if true, fetch() is called when MMAs of the tile are in flight
//                                   and all pieces of the previous tile have been put
//   kAddsDuringMainloop             if true, parts of addends are read before complete():
//     schedule_addends(tile, is_first)   when they are read
//     kParts, add_addend(sums, part)     adds the next part, which is part 0, 1, ... kParts - 1 in
//                                        turn
//     take(part)                         reads it into registers, for complete()
//   store(tile, rounded, piece)     stores 64 x 64 outputs, in order, after complete()
// The tensor cores do not wait for store(). If a thread has registers for two sets of accumulators,
// the next tile starts in the other set, and one piece is put with every stage; otherwise all
// pieces are rounded at the end of the tile, and put when the next tile is in flight.
template <typename Config, typename Scheduler, typename TileOutput>
class ConsumerLoop {
  static constexpr int kPieces = Config::kPieces;
  using Sums = typename MmaPipeline<Config>::Sums;

 public:
  __device__ __forceinline__ ConsumerLoop(MmaPipeline<Config>& mma, Scheduler units,
                                          TileOutput& outputs)
      : mma_(mma), scheduler_(units), outputs_(outputs) {}

  __device__ __forceinline__ void run() {
    if constexpr (Config::kNumAccumulatorSets == 1) {
      run_with_one_set();
    } else {
      run_with_two_sets();
    }
  }

 private:
  __device__ __forceinline__ void run_with_one_set() {
    Sums sums;
    OutputFragment rounded[kPieces];
    WorkTile work_tile;
    WorkTile finished_tile{};
    bool has_finished_tile = false;
    const auto store_finished_tile = [&]() __attribute__((always_inline)) {
      if (!has_finished_tile) return;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) outputs_.store(finished_tile, rounded[i], i);
    };
    while (scheduler_.next(work_tile)) {
      mma_.begin(sums, true);
      int k = 1;
      if (work_tile.depth > 1) {
        mma_.begin(sums, false);
        ++k;
      }
      store_finished_tile();
      fetch();
      if (work_tile.depth > 1) mma_.wait_previous();
      if constexpr (TileOutput::kAddsDuringMainloop)
        k = multiply_and_add(work_tile, sums, k, !has_finished_tile);
      multiply(work_tile.depth, sums, k);
      mma_.end(sums);
      outputs_.complete(work_tile, sums);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) rounded[i] = round_to_fragment<Config>(sums, i);
      warpgroup_fence_operand(sums);
      finished_tile = work_tile;
      has_finished_tile = true;
    }
    store_finished_tile();
  }

  // Every branch of the loop either drains all MMAs or leaves the same ones in flight: at a join of
  // control flow where that differs, ptxas inserts a wait after every MMA.
  __device__ __forceinline__ void run_with_two_sets() {
    Sums even;
    Sums odd;
    WorkTile work_tile;
    if (!scheduler_.next(work_tile)) return;
    mma_.begin(even, true);
    fetch();
    multiply(work_tile.depth, even, 1);
    while (true) {
      const WorkTile first = work_tile;
      if (!scheduler_.next(work_tile)) {
        finish(first, even);
        break;
      }
      begin_next_tile(first, even, work_tile, odd);
      const WorkTile second = work_tile;
      if (!scheduler_.next(work_tile)) {
        finish(second, odd);
        break;
      }
      begin_next_tile(second, odd, work_tile, even);
    }
  }

  __device__ __forceinline__ void finish(const WorkTile& finished_tile, Sums& sums) {
    mma_.end(sums);
    outputs_.complete(finished_tile, sums);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      outputs_.store(finished_tile, round_to_fragment<Config>(sums, i), i);
  }

  // Finishes `finished_tile`, and multiplies `work_tile` up to the wait for its last stage.
  __device__ __forceinline__ void begin_next_tile(const WorkTile& finished_tile, Sums& before,
                                                  const WorkTile& work_tile, Sums& now) {
    mma_.begin(now, true);
    mma_.wait_previous(before);
    outputs_.complete(finished_tile, before);
    int k = 1;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (k < work_tile.depth) {
        mma_.begin(now, false);
        outputs_.store(finished_tile, round_to_fragment<Config>(before, i), i);
        mma_.wait_previous();
        ++k;
      } else {
        outputs_.store(finished_tile, round_to_fragment<Config>(before, i), i);
      }
    }
    fetch();
    multiply(work_tile.depth, now, k);
  }

  __device__ __forceinline__ void fetch() {
    if constexpr (TileOutput::kPrefetchesAddends) outputs_.fetch();
  }

  // Multiplies the stages from k on, up to the last one after which a part is read. Returns the
  // number of stages begun so far.
  __device__ __forceinline__ int multiply_and_add(const WorkTile& work_tile, Sums& sums, int k,
                                                  bool is_first) {
    const AddendSchedule schedule_addends = outputs_.schedule_addends(work_tile, is_first);
    int next = schedule_addends.first;
#pragma unroll 1
    for (int i = 0; i < schedule_addends.added; ++i) {
#pragma unroll
      for (int part = 0; part < TileOutput::kParts; ++part, next += schedule_addends.between) {
        k = multiply(next, sums, k);
        mma_.end(sums);
        outputs_.add_addend(sums, part);
        warpgroup_fence_operand(sums);
        mma_.begin(sums, false);
        ++k;
      }
    }
#pragma unroll
    for (int part = 0; part < TileOutput::kParts; ++part, next += schedule_addends.between) {
      k = multiply(next, sums, k);
      outputs_.take(part);
    }
    return k;
  }

  // Multiplies the stages from k on, and leaves the last one in flight. Returns the number of
  // stages begun so far.
  __device__ __forceinline__ int multiply(int depth, Sums& sums, int k) {
    for (; k < depth; ++k) {
      mma_.begin(sums, false);
      mma_.wait_previous();
    }
    return k;
  }

  MmaPipeline<Config>& mma_;
  Scheduler scheduler_;
  TileOutput& outputs_;
};

template <typename Config, typename GemmPolicy>
__device__ __forceinline__ void compute_tiles(const GemmParams& p, GemmPolicy& policy,
                                              uint32_t shared, SharedBarriers<Config>& barriers,
                                              int group) {
  MmaPipeline<Config> mma(shared, barriers, group);
  EpilogueWriter<Config, GemmPolicy> outputs(
      p, policy, mma, shared + Config::kStages * Config::kStageBytes, barriers, group);
  const auto units = policy.units(p);
  ConsumerLoop<Config, decltype(policy.units(p)), EpilogueWriter<Config, GemmPolicy>>(mma, units,
                                                                                      outputs)
      .run();
  outputs.end();
}

// Runs on a block of Config::kThreads threads with Config::kSharedBytes of shared memory.
template <typename Config, typename GemmPolicy>
__device__ __forceinline__ void run_gemm(const GemmParams& p, GemmPolicy& policy,
                                         char* dynamic_shared) {
  __shared__ SharedBarriers<Config> barriers;
  const uint32_t shared = (shared_address(dynamic_shared) + 1023) & ~uint32_t{1023};
  if (threadIdx.x == 0) {
    init_stages(barriers);
    fence_barrier_init();
  }
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) load_tiles<Config>(p, policy, shared, barriers);
    if constexpr (GemmPolicy::kWaitsForPeers) {
      if (threadIdx.x / 32 == 1) policy.watch();
    }
    static_assert(
        !GemmPolicy::kWaitsForPeers || GemmPolicy::kAddendPosition == AddendPosition::none,
        "both are this warp's");
    if constexpr (GemmPolicy::kAddendPosition != AddendPosition::none) {
      if (threadIdx.x == 32) {
        load_addends<Config>(p, policy, shared + Config::kStages * Config::kStageBytes, barriers);
      }
    }
  } else {
    warpgroup_reg_alloc<232>();
    compute_tiles<Config>(p, policy, shared, barriers, group - 1);
  }
  // Other blocks of the cluster write to this block's shared memory, and arrive at its barriers,
  // until they are done.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace torch_overlap::sm90
