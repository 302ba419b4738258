#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"

// A persistent matrix product for Hopper. One block an SM, three warpgroups:
//
//   0     one thread loads the stages of both operands by tensor copies, as far ahead as
//         shared memory goes, over the borders of tiles
//   1, 2  each multiplies its part of the tile out of shared memory into registers (wgmma) and
//         applies the epilogue; while the next tile is computed, 64 x 64 outputs at a time go to
//         shared memory, from where tensor copies store them
//
// Every stage has two barriers: `full` counts the bytes that have come, `empty` the eight warps
// that are done with it. The structure is that of CUTLASS's warp-specialized cooperative kernels
// and of DeepGEMM.
//
// What differs between the plain product and those that talk to other ranks is in `Work`:
//   units(p)                          the units of this block, next() after next()
//   lhs(unit, &row)                   the map of the rows of lhs; called by the thread that
//                                     loads before it does: waits until they are there
//   store(unit, from, column, row)    stores 64 x 64 outputs
namespace torch_overlap::sm90 {

template <typename Config>
struct SharedBarriers {
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
};

template <typename Config>
__device__ __forceinline__ void init_stages(SharedBarriers<Config>& barriers) {
  for (int i = 0; i < Config::kStages; ++i) {
    barrier_init(shared_address(&barriers.full[i]), 1);
    barrier_init(shared_address(&barriers.empty[i]), 8 * Config::kCluster);
  }
}

// Where the next stage is: the number, and in which phase its barriers are.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// This block's part of rhs, to all blocks of the cluster.
template <typename Config>
__device__ __forceinline__ void load_rhs(const GemmParams& p, uint32_t to, uint32_t full, int depth,
                                         int column) {
  constexpr int kPart = Config::kColumns / Config::kCluster;
  const int first = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank()) * kPart;
  const auto load = [&](int offset, int x, int y) {
    if constexpr (Config::kCluster == 1) {
      tensor_load(to + offset * 128, &p.rhs, full, x, y);
    } else {
      tensor_load_to_all(to + offset * 128, &p.rhs, full, x, y, (1 << Config::kCluster) - 1);
    }
  };
  if constexpr (Config::kRhsAlongK) {
    load(first, depth, column + first);
  } else {
#pragma unroll
    for (int i = 0; i < kPart; i += 64) load(first + i, column + first + i, depth);
  }
}

template <typename Config, typename Work>
__device__ __forceinline__ void load_units(const GemmParams& p, Work& work, uint32_t shared,
                                           SharedBarriers<Config>& barriers) {
  StageCursor<Config::kStages> at;
  auto units = work.units(p);
  Unit unit;
  while (units.next(unit)) {
    int row = unit.row * Config::kRows;
    const int column = unit.column * Config::kColumns;
    const CUtensorMap* const lhs = work.lhs(unit, row);
    for (int k = 0; k < unit.depth; ++k, at.advance()) {
      barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
      const uint32_t full = shared_address(&barriers.full[at.stage]);
      const uint32_t to = shared + at.stage * Config::kStageBytes;
      const int depth = k * Config::kDepth;
      barrier_expect(full, Config::kStageBytes);
      tensor_load(to, lhs, full, depth, row);
      load_rhs<Config>(p, to + Config::kLhsBytes, full, depth, column);
    }
  }
}

// One warpgroup's part of a tile.
template <typename Config>
class Multiplier {
 public:
  // group: 0 or 1.
  __device__ __forceinline__ Multiplier(uint32_t shared, SharedBarriers<Config>& barriers,
                                        int group)
      : shared_(shared),
        barriers_(barriers),
        row_(group / Config::kColumnGroups * 64 * Config::kRepeats),
        column_(group % Config::kColumnGroups * Config::kWidth) {}

  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int column() const { return column_; }

  float sums[Config::kRepeats][Config::kAccumulators];

  // `meanwhile()` is called when the first stages are under way, and must leave the sums alone.
  template <typename Meanwhile>
  __device__ __forceinline__ void multiply(const Unit& unit, const Meanwhile& meanwhile) {
    multiply(unit, meanwhile, [](int) { return false; }, [] {});
  }
  // `between()`, always behind `meanwhile()`, changes the sums before those stages of k for which
  // is_due(k).
  template <typename Meanwhile, typename IsDue, typename Between>
  __device__ __forceinline__ void multiply(const Unit& unit, const Meanwhile& meanwhile,
                                           const IsDue& is_due, const Between& between) {
    int before = begin_stage(true);
    const bool has_second = unit.depth > 1;
    const int second = has_second ? begin_stage(false) : before;
    meanwhile();
    if (has_second) {
      wgmma_wait<1>();
      release(before);
      before = second;
    }
    for (int k = 2; k < unit.depth; ++k) {
      if (is_due(k)) {
        wgmma_wait<0>();
        hold_sums();
        if (before >= 0) release(before);
        before = -1;
        between();
      }
      const int now = begin_stage(false);
      wgmma_wait<1>();
      if (before >= 0) release(before);
      before = now;
    }
    wgmma_wait<0>();
    hold_sums();
    release(before);
  }

 private:
  // The products of the next stage, which is returned.
  __device__ __forceinline__ int begin_stage(bool is_first) {
    const int stage = at_.stage;
    barrier_wait(shared_address(&barriers_.full[stage]), at_.phase);
    at_.advance();
    const uint32_t lhs = shared_ + stage * Config::kStageBytes + row_ * 128;
    const uint32_t rhs = shared_ + stage * Config::kStageBytes + Config::kLhsBytes + column_ * 128;
    hold_sums();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < Config::kRepeats; ++r) {
        wgmma<0, !Config::kRhsAlongK>(typename Config::In{}, Columns<Config::kWidth>{}, sums[r],
                                      operand<true>(lhs + r * 64 * 128, step),
                                      operand<Config::kRhsAlongK>(rhs, step),
                                      !is_first || step != 0);
      }
    }
    wgmma_commit();
    return stage;
  }
  __device__ __forceinline__ void hold_sums() {
#pragma unroll
    for (int r = 0; r < Config::kRepeats; ++r) hold(sums[r]);
  }
  template <bool kAlongK>
  static __device__ __forceinline__ uint64_t operand(uint32_t address, int step) {
    if constexpr (kAlongK) return descriptor_k(address + step * 32);
    return descriptor_mn(address + step * 2048);
  }
  __device__ __forceinline__ void release(int stage) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t empty = shared_address(&barriers_.empty[stage]);
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else {
      if (lane < Config::kCluster)
        barrier_arrive_at(empty, lane);  // all of them write to this stage
    }
  }

  const uint32_t shared_;
  SharedBarriers<Config>& barriers_;
  const int row_;
  const int column_;
  StageCursor<Config::kStages> at_;
};

// 64 x 64 outputs of a warpgroup, two neighbours of a row in each register.
struct Rounded {
  uint32_t pairs[16];
};

// The epilogue on a warpgroup's part of a tile, whose first column is `column`.
template <typename Config>
__device__ __forceinline__ void apply_epilogue_to(
    const GemmParams& p, float (&sums)[Config::kRepeats][Config::kAccumulators], int column) {
#pragma unroll
  for (auto& row : sums) {
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      apply_epilogue(p, row, chunk, column + 64 * chunk);
    }
  }
}
template <typename Config, int kPieces>
__device__ __forceinline__ void round_sums(
    const float (&sums)[Config::kRepeats][Config::kAccumulators], Rounded (&out)[kPieces]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int from = piece % Config::kChunks * 32 + 2 * i;
      const auto& row = sums[piece / Config::kChunks];
      out[piece].pairs[i] = pack(typename Config::Out{}, row[from], row[from + 1]);
    }
  }
}

// Where this lane's row of four 8 x 8 matrices lies in 64 x 64 outputs under the 128-byte swizzle:
// 16 rows of its warp by the columns 16 * i to 16 * i + 15. Register r of load_matrices() and
// store_matrices() is then pairs[4 * i + r].
__device__ __forceinline__ uint32_t matrix_row(uint32_t outputs, int i) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
  return outputs + row * 128 + (((2 * i + lane / 16) ^ (row & 7)) << 4);
}

__device__ __forceinline__ void put_to_shared(const Rounded& rounded, uint32_t to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store_matrices(matrix_row(to, i), rounded.pairs + 4 * i);
}

// The outputs of a tile wait in registers, rounded, until the products of the next one are under
// way: the tensor cores do not wait for shared memory and its copies.
template <typename Config, typename Work>
__device__ __forceinline__ void compute_units(const GemmParams& p, Work& work, uint32_t shared,
                                              SharedBarriers<Config>& barriers, int group) {
  constexpr int kPieces = Config::kRepeats * Config::kChunks;
  Multiplier<Config> mine(shared, barriers, group);
  const uint32_t buffers = shared + Config::kStages * Config::kStageBytes +
                           group * Config::kStoreBuffers * Config::kStoreBytes;
  const bool stores = threadIdx.x % 128 == 0;
  Rounded rounded[kPieces];
  Unit made{};
  bool has_made = false;
  const auto store_made = [&]() __attribute__((always_inline)) {
    if (!has_made) return;
    const int row = made.row * Config::kRows + mine.row();
    const int column = made.column * Config::kColumns + mine.column();
#pragma unroll
    for (int first = 0; first < kPieces; first += Config::kStoreBuffers) {
      if (stores) stores_read<0>();
      named_barrier(1 + group, 128);
#pragma unroll
      for (int i = 0; i < Config::kStoreBuffers; ++i) {
        put_to_shared(rounded[first + i], buffers + i * Config::kStoreBytes);
      }
      fence_shared_for_copies();
      named_barrier(1 + group, 128);
      if (stores) {
        for (int i = 0; i < Config::kStoreBuffers; ++i) {
          const int r = (first + i) / Config::kChunks;
          const int chunk = (first + i) % Config::kChunks;
          work.store(made, buffers + i * Config::kStoreBytes, column + 64 * chunk, row + 64 * r);
        }
        store_commit();
      }
    }
  };
  auto units = work.units(p);
  Unit unit;
  while (units.next(unit)) {
    mine.multiply(unit, store_made);
    if (!p.plain) {
      apply_epilogue_to<Config>(p, mine.sums, unit.column * Config::kColumns + mine.column());
    }
    round_sums<Config>(mine.sums, rounded);
    made = unit;
    has_made = true;
  }
  store_made();
  if (stores) stores_done<0>();
}

// Of a block of Config::kThreads threads with Config::kSharedBytes of shared memory.
template <typename Config, typename Work>
__device__ __forceinline__ void run_gemm(const GemmParams& p, Work& work, char* dynamic_shared) {
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
    fewer_registers<40>();
    if (threadIdx.x == 0) load_units<Config>(p, work, shared, barriers);
  } else {
    more_registers<232>();
    compute_units<Config>(p, work, shared, barriers, group - 1);
  }
  // The shared memory of a block is written to and its barriers arrived at by others until they are
  // done.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace torch_overlap::sm90
