#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/multiplier.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"

// A persistent matrix product for Hopper. One block an SM, three warpgroups:
//
//   0     one thread loads the stages of both operands by tensor copies, as far ahead as
//         shared memory goes, over the borders of tiles
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
//   kFetches                          whether something is added to the outputs before they are
//                                     rounded
//   residual(), loaded()              then its map, and this warp's barrier for it. The part of a
//                                     tile comes to where its outputs will lie, while it is
//                                     multiplied
//   kAdds                             whether matrices like the product are added to it before the
//                                     epilogue
//   addends(), addend(unit, i)        then how many, one at least, and the map of one, by 64 x 64;
//                                     called by the thread that loads before it does: waits until
//                                     it is there. Their parts of a tile come in stages of their
//                                     own
//   factor()                          and what the sum is multiplied by
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

// The stages of k of a tile before its first addend, from each to the next, and behind the last.
// All blocks would come to their addends at the same time, and wait for memory, which has little to
// do otherwise: so they come between the stages of k, at other places in neighbouring tiles. Not in
// the first tile of a block, whose addends may still be on their way; and sums that are to be
// scaled must be complete before anything is added.
struct AddendSpread {
  int before;
  int between;
  int behind;
};

template <typename Config>
__device__ __forceinline__ AddendSpread spread_addends(const Unit& unit, int addends,
                                                       bool is_first) {
  if (Config::kIsScaled || is_first) return {unit.depth, 0, 0};
  constexpr int kPlaces = 8;
  const int between = unit.depth / (addends + 1);
  const int place = (unit.row / Config::kCluster + unit.column) % kPlaces;
  const int earlier = place * between / kPlaces;
  return {unit.depth - addends * between - earlier, between, between + earlier};
}

// What is added to a tile: 64 rows a stage, where rhs would lie.
template <typename Config, typename Work>
__device__ __forceinline__ void load_addend(Work& work, const Unit& unit, int i, uint32_t shared,
                                            SharedBarriers<Config>& barriers,
                                            StageCursor<Config::kStages>& at) {
  const CUtensorMap* const from = work.addend(unit, i);
  for (int group = 0; group < Config::kRowGroups; ++group, at.advance()) {
    barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
    const uint32_t full = shared_address(&barriers.full[at.stage]);
    const uint32_t to = shared + at.stage * Config::kStageBytes + Config::kLhsBytes;
    barrier_expect(full, Config::kRhsBytes);
#pragma unroll
    for (int block = 0; block < Config::kColumns / 64; ++block) {
      tensor_load(to + block * Config::kStoreBytes, from, full,
                  unit.column * Config::kColumns + 64 * block,
                  unit.row * Config::kRows + 64 * group);
    }
  }
}

template <typename Config, typename Work>
__device__ __forceinline__ void load_units(const GemmParams& p, Work& work, uint32_t shared,
                                           SharedBarriers<Config>& barriers) {
  StageCursor<Config::kStages> at;
  static_assert(!Work::kAdds || Config::kSets == 1, "a tile is complete before the next begins");
  auto units = work.units(p);
  Unit unit;
  bool is_first = true;
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
    if constexpr (Work::kAdds) {
      const int addends = work.addends();
      const AddendSpread spread = spread_addends<Config>(unit, addends, is_first);
      is_first = false;
      for (int i = 0; i < addends; ++i) {
        load_to(spread.before + i * spread.between);
        load_addend<Config>(work, unit, i, shared, barriers, at);
      }
    }
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
//   kAdds, addends(), add(unit, sums)
//                                   whether, and how many, stages between those of k are added to
//                                   sums, and adding the next one
//   kFetches, fetch(unit)           whether there is something to begin when products of the tile
//                                   are under way and all of those before are put, and beginning it
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
      int addends = 0;
      AddendSpread spread{unit.depth, 0, 0};
      if constexpr (Outputs::kAdds) {
        addends = outputs_.addends();
        spread = spread_addends<Config>(unit, addends, !has_made);
      }
      mine_.begin(sums, true);
      int k = 1;
      if (spread.before > 1) {
        mine_.begin(sums, false);
        ++k;
      }
      put_made();
      fetch(unit);
      if (spread.before > 1) mine_.end_before();
      multiply(spread.before, sums, k);
      mine_.end(sums);
      if constexpr (Outputs::kAdds) {
#pragma unroll 1
        for (int i = 0; i < addends; ++i) {
          outputs_.add(unit, sums, i);
          if (spread.between == 0) continue;
          mine_.begin(sums, false);
          multiply(i + 1 < addends ? spread.between : spread.behind, sums, 1);
          mine_.end(sums);
        }
      }
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
    fetch(unit);
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
    fetch(unit);
    multiply(unit.depth, now, k);
  }

  __device__ __forceinline__ void fetch(const Unit& unit) {
    if constexpr (Outputs::kFetches) outputs_.fetch(unit);
  }

  // The stages from k on; the last one is under way afterwards.
  __device__ __forceinline__ void multiply(int depth, Sums& sums, int k) {
    for (; k < depth; ++k) {
      mine_.begin(sums, false);
      mine_.end_before();
    }
  }

  Multiplier<Config>& mine_;
  Units units_;
  Outputs& outputs_;
};

// Outputs go through shared memory to Work::store(), each warp's rows by themselves.
template <typename Config, typename Work>
class StoredOutputs {
 public:
  using Sums = typename Multiplier<Config>::Sums;
  static constexpr bool kFetches = Work::kFetches;
  static constexpr bool kAdds = Work::kAdds;
  static_assert(!kFetches || Config::kStoreBuffers == Config::kPieces);

  __device__ __forceinline__ StoredOutputs(const GemmParams& p, Work& work,
                                           Multiplier<Config>& mine, uint32_t buffers)
      : p_(p),
        work_(work),
        mine_(mine),
        row_(mine.row()),
        column_(mine.column()),
        buffers_(buffers) {
    if constexpr (Config::kIsScaled) scale_ = scale_of(p.epilogue);
  }

  // This warp's rows of the residual, when the stores of the tile before have left their place.
  __device__ __forceinline__ void fetch(const Unit& unit) const {
    if (threadIdx.x % 32 == 0) {
      stores_read<0>();
      barrier_expect(work_.loaded(), Config::kPieces * kWarpRows * 128);
#pragma unroll
      for (int i = 0; i < Config::kPieces; ++i) {
        tensor_load(buffers_ + i * Config::kStoreBytes + first_row() * 128, work_.residual(),
                    work_.loaded(), column_of(unit, i),
                    unit.row * Config::kRows + row_ + first_row());
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ int addends() const { return work_.addends(); }
  __device__ __forceinline__ void add(const Unit& unit, Sums& sums, int i) {
    if (i == 0) scale(unit, sums);
    mine_.add(sums);
  }
  __device__ __forceinline__ void complete(const Unit& unit, Sums& sums) {
    if constexpr (kAdds) {
      if (work_.factor() != 1.0F) multiply_by(work_.factor(), sums);
    } else {
      scale(unit, sums);
    }
    if (!p_.plain) {
#pragma unroll
      for (int i = 0; i < Config::kPieces; ++i) {
        apply_epilogue(p_, sums, i, unit.column * Config::kColumns + column_ + 64 * i);
      }
    }
    if constexpr (kFetches) {
      barrier_wait(work_.loaded(), phase_);
      phase_ ^= 1;
#pragma unroll
      for (int i = 0; i < Config::kPieces; ++i) {
        add_from_shared<Config>(sums, i, buffers_ + i * Config::kStoreBytes);
      }
    }
  }
  __device__ __forceinline__ void put(const Unit& unit, const Rounded& rounded, int piece) const {
    const uint32_t to = buffers_ + piece % Config::kStoreBuffers * Config::kStoreBytes;
    const bool stores = threadIdx.x % 32 == 0;
    if (stores) stores_read<Config::kStoreBuffers - 1>();
    __syncwarp();
    put_to_shared(rounded, to);
    fence_shared_for_copies();
    __syncwarp();
    if (!stores) return;
    work_.store(unit, to + first_row() * 128, column_of(unit, piece),
                unit.row * Config::kRows + row_ + first_row());
    store_commit();
  }
  static __device__ __forceinline__ void end() {
    if (threadIdx.x % 32 == 0) stores_done<0>();
  }

 private:
  __device__ __forceinline__ void scale(const Unit& unit, Sums& sums) const {
    if constexpr (Config::kIsScaled) {
      if (p_.epilogue.scaled_by_row) {
        int rows;
        const float* const scales = work_.lhs_scale(unit, rows);
        const int first = unit.row * Config::kRows + row_;
        scale_by_row(p_, sums, scales + first, rows - first,
                     unit.column * Config::kColumns + column_);
      } else {
        multiply_by(scale_, sums);
      }
    }
  }
  // Of this warp, in those of its warpgroup.
  static __device__ __forceinline__ int first_row() {
    return static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
  }
  __device__ __forceinline__ int column_of(const Unit& unit, int piece) const {
    return unit.column * Config::kColumns + column_ + Config::piece_column(piece);
  }

  const GemmParams& p_;
  Work& work_;
  Multiplier<Config>& mine_;
  const int row_;
  const int column_;
  const uint32_t buffers_;
  float scale_ = 1.0F;  // of both operands
  uint32_t phase_ = 0;  // of the barrier of the residual
};

template <typename Config, typename Work>
__device__ __forceinline__ void compute_units(const GemmParams& p, Work& work, uint32_t shared,
                                              SharedBarriers<Config>& barriers, int group) {
  Multiplier<Config> mine(shared, barriers, group);
  StoredOutputs<Config, Work> outputs(p, work, mine,
                                      shared + Config::kStages * Config::kStageBytes +
                                          group * Config::kStoreBuffers * Config::kStoreBytes);
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
  } else {
    more_registers<232>();
    compute_units<Config>(p, work, shared, barriers, group - 1);
  }
  // The shared memory of a block is written to and its barriers arrived at by others until they are
  // done.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace torch_overlap::sm90
