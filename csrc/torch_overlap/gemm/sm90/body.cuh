#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/multiplier.cuh"
#include "torch_overlap/gemm/sm90/outputs.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"

// A persistent matrix product for Hopper. One block an SM, three warpgroups:
//
//   0     one thread loads the stages of both operands by tensor copies, as far ahead as
//         shared memory goes, over the borders of tiles; another one what is added to outputs
//   1, 2  each multiplies its part of the tile out of shared memory into registers (wgmma) and
//         applies the epilogue; while the next tile is computed, 64 x 64 outputs at a time go to
//         shared memory, from where each warp stores its rows by a tensor copy
//
// Every stage has two barriers: `full` counts the bytes that have come, `empty` the eight warps
// that are done with it. The structure is that of CUTLASS's warp-specialized cooperative kernels
// and of DeepGEMM.
//
// What differs between the plain product and those that talk to other ranks is in `Work`:
//   units(p)                          the units of this block, next() after next()
//   lhs(unit, &row)                   the map of the rows of lhs
//   kAwaits                           whether they may still be on their way
//   watch()                           then another warp waits for them
//   await(unit, k), has_loaded(unit)  and the thread that loads asks how many stages of k of the
//                                     unit are there, more than k of them; at its end:
//   end()
//   lhs_scale(unit, rows)             the scales of the rows that unit.row counts, and how many
//   store(unit, from, column, row)    stores 16 x 64 outputs
//   kAdds                             whether matrices like the product are added to it, before the
//                                     epilogue or behind it; then:
//   addends(), addend(unit, i)        how many, one at least, and the map of one, by 64 x 64: asked
//                                     by the thread that loads it, for which it waits until the
//                                     unit's part of it is there
//   factor()                          before the epilogue: what the sum is multiplied by
namespace torch_overlap::sm90 {

// This block's rows of lhs, which no other one reads.
template <typename Config>
__device__ __forceinline__ void load_lhs(uint32_t to, const CUtensorMap* lhs, uint32_t full,
                                         int depth, int row) {
  if constexpr (Config::kLhsAlongK) {
    tensor_load(to, lhs, full, depth, row);
  } else {
#pragma unroll
    for (int first = 0; first < Config::kRows; first += Config::kLhsBlock) {
      tensor_load(to + first * 128, lhs, full, row + first, depth);
    }
  }
}

// This block's part of rhs, to all blocks of the cluster: as many rows along k as each other's, or
// every so many-th of the blocks of columns.
template <typename Config>
__device__ __forceinline__ void load_rhs(const GemmParams& p, uint32_t to, uint32_t full, int depth,
                                         int column) {
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const auto load = [&](int offset, int x, int y) {
    if constexpr (Config::kCluster == 1) {
      tensor_load(to + offset * 128, &p.rhs, full, x, y);
    } else {
      tensor_load_to_all(to + offset * 128, &p.rhs, full, x, y, (1 << Config::kCluster) - 1);
    }
  };
  if constexpr (Config::kRhsAlongK) {
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
    int k = 0;
    const auto load_to = [&](int end) {
      for (; k < end; ++k, at.advance()) {
        barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
        const uint32_t full = shared_address(&barriers.full[at.stage]);
        const uint32_t to = shared + at.stage * Config::kStageBytes;
        const int depth = k * Config::kDepth;
        barrier_expect(full, Config::kStageBytes);
        load_lhs<Config>(to, lhs, full, depth, row);
        load_rhs<Config>(p, to + Config::kLhsBytes, full, depth, column);
      }
    };
    if constexpr (Work::kAwaits) {
      while (k < unit.depth) load_to(work.await(unit, k));
      work.has_loaded(unit);
    } else {
      load_to(unit.depth);
    }
  }
  if constexpr (Work::kAwaits) work.end();
}

// The tiles of a warpgroup, one after the other. `Outputs` says what becomes of the sums of each:
//   complete(unit, sums)            all products are there
//   kFetches, fetch()               whether there is something to begin when products of the tile
//                                   are under way and all of those before are put, and beginning it
//   kAddsBetween                    whether parts of what is added are read before complete(): then
//   spread(unit, is_first)          when
//   kParts, add_early(sums, part)   adds the next part, which is part 0, 1, ... of kParts by turns
//   take(part)                      reads it into registers, for complete()
//   put(unit, rounded, piece)       64 x 64 outputs each, in order, behind complete()
// The tensor cores do not wait for put(). Where a thread has registers for two sets of sums, the
// next tile begins in the other one, and a piece leaves with every stage; else all pieces are
// rounded at the end, and leave when the next tile is under way.
template <typename Config, typename Units, typename Outputs>
class Tiles {
  static constexpr int kPieces = Config::kPieces;
  using Sums = typename Multiplier<Config>::Sums;

 public:
  __device__ __forceinline__ Tiles(Multiplier<Config>& mine, Units units, Outputs& outputs)
      : mine_(mine), units_(units), outputs_(outputs) {}

  __device__ __forceinline__ void run() {
    if constexpr (Config::kSets == 1) {
      with_one_set();
    } else {
      with_two_sets();
    }
  }

 private:
  __device__ __forceinline__ void with_one_set() {
    Sums sums;
    Rounded rounded[kPieces];
    Unit unit;
    Unit made{};
    bool has_made = false;
    const auto put_made = [&]() __attribute__((always_inline)) {
      if (!has_made) return;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) outputs_.put(made, rounded[i], i);
    };
    while (units_.next(unit)) {
      mine_.begin(sums, true);
      int k = 1;
      if (unit.depth > 1) {
        mine_.begin(sums, false);
        ++k;
      }
      put_made();
      fetch();
      if (unit.depth > 1) mine_.end_before();
      if constexpr (Outputs::kAddsBetween) k = multiply_and_add(unit, sums, k, !has_made);
      multiply(unit.depth, sums, k);
      mine_.end(sums);
      outputs_.complete(unit, sums);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) rounded[i] = round_piece<Config>(sums, i);
      hold(sums);
      made = unit;
      has_made = true;
    }
    put_made();
  }

  // Written so that every branch of the loop either ends all products or leaves the same ones under
  // way: where ways meet that differ in this, ptxas waits after every product.
  __device__ __forceinline__ void with_two_sets() {
    Sums even;
    Sums odd;
    Unit unit;
    if (!units_.next(unit)) return;
    mine_.begin(even, true);
    fetch();
    multiply(unit.depth, even, 1);
    while (true) {
      const Unit first = unit;
      if (!units_.next(unit)) {
        finish(first, even);
        break;
      }
      begin_behind(first, even, unit, odd);
      const Unit second = unit;
      if (!units_.next(unit)) {
        finish(second, odd);
        break;
      }
      begin_behind(second, odd, unit, even);
    }
  }

  __device__ __forceinline__ void finish(const Unit& made, Sums& sums) {
    mine_.end(sums);
    outputs_.complete(made, sums);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) outputs_.put(made, round_piece<Config>(sums, i), i);
  }

  // Ends the tile `made`, and computes `unit` but for the end of its last stage.
  __device__ __forceinline__ void begin_behind(const Unit& made, Sums& before, const Unit& unit,
                                               Sums& now) {
    mine_.begin(now, true);
    mine_.end_before(before);
    outputs_.complete(made, before);
    int k = 1;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (k < unit.depth) {
        mine_.begin(now, false);
        outputs_.put(made, round_piece<Config>(before, i), i);
        mine_.end_before();
        ++k;
      } else {
        outputs_.put(made, round_piece<Config>(before, i), i);
      }
    }
    fetch();
    multiply(unit.depth, now, k);
  }

  __device__ __forceinline__ void fetch() {
    if constexpr (Outputs::kFetches) outputs_.fetch();
  }

  // The stages from k on, up to the last one that something is read behind. As multiply().
  __device__ __forceinline__ int multiply_and_add(const Unit& unit, Sums& sums, int k,
                                                  bool is_first) {
    const AddendSpread spread = outputs_.spread(unit, is_first);
    int next = spread.first;
#pragma unroll 1
    for (int i = 0; i < spread.added; ++i) {
#pragma unroll
      for (int part = 0; part < Outputs::kParts; ++part, next += spread.between) {
        k = multiply(next, sums, k);
        mine_.end(sums);
        outputs_.add_early(sums, part);
        hold(sums);
        mine_.begin(sums, false);
        ++k;
      }
    }
#pragma unroll
    for (int part = 0; part < Outputs::kParts; ++part, next += spread.between) {
      k = multiply(next, sums, k);
      outputs_.take(part);
    }
    return k;
  }

  // The stages from k on; the last one is under way afterwards. Returns how many have been.
  __device__ __forceinline__ int multiply(int depth, Sums& sums, int k) {
    for (; k < depth; ++k) {
      mine_.begin(sums, false);
      mine_.end_before();
    }
    return k;
  }

  Multiplier<Config>& mine_;
  Units units_;
  Outputs& outputs_;
};

template <typename Config, typename Work>
__device__ __forceinline__ void compute_units(const GemmParams& p, Work& work, uint32_t shared,
                                              SharedBarriers<Config>& barriers, int group) {
  Multiplier<Config> mine(shared, barriers, group);
  StoredOutputs<Config, Work> outputs(p, work, mine, shared + Config::kStages * Config::kStageBytes,
                                      barriers, group);
  const auto units = work.units(p);
  Tiles<Config, decltype(work.units(p)), StoredOutputs<Config, Work>>(mine, units, outputs).run();
  outputs.end();
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
    if constexpr (Work::kAwaits) {
      if (threadIdx.x / 32 == 1) work.watch();
    }
    static_assert(!Work::kAwaits || Work::kAdds == Adds::nothing, "both are this warp's");
    if constexpr (Work::kAdds != Adds::nothing) {
      if (threadIdx.x == 32) {
        load_addends<Config>(p, work, shared + Config::kStages * Config::kStageBytes, barriers);
      }
    }
  } else {
    more_registers<232>();
    compute_units<Config>(p, work, shared, barriers, group - 1);
  }
  // The shared memory of a block is written to and its barriers arrived at by others until they are
  // done.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace torch_overlap::sm90
