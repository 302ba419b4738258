#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/multiplier.cuh"
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

// What is added to tiles, by one thread: part after part to where the outputs of each warpgroup
// will lie, as soon as there is room. The stages of k are loaded by another one, which does not
// wait.
template <typename Config, typename Work>
__device__ __forceinline__ void load_addends(const GemmParams& p, Work& work, uint32_t buffers,
                                             SharedBarriers<Config>& barriers) {
  uint32_t phase = 0;
  auto units = work.units(p);
  Unit unit;
  while (units.next(unit)) {
    for (int i = 0; i < work.addends(); ++i) {
      const CUtensorMap* const from = work.addend(unit, i);
      for (int first = 0; first < Config::kPieces; first += Config::kStoreBuffers, phase ^= 1) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const uint32_t loaded = shared_address(&barriers.loaded[group]);
          barrier_wait(shared_address(&barriers.taken[group]), phase);
          barrier_expect(loaded, Config::kStoreBuffers * Config::kStoreBytes);
#pragma unroll
          for (int j = 0; j < Config::kStoreBuffers; ++j) {
            tensor_load(
                buffers + (group * Config::kStoreBuffers + j) * Config::kStoreBytes, from, loaded,
                unit.column * Config::kColumns + group % Config::kColumnGroups * Config::kWidth +
                    Config::piece_column(first + j),
                unit.row * Config::kRows + group / Config::kColumnGroups * 64);
          }
        }
      }
    }
  }
}

// Behind how many stages of k the first part of what is added to a tile is read, and how many there
// are from each part to the next. Products end for those of so many addends, which are added; those
// of the next one are taken beside products; what is left is added when all products are there.
struct AddendSpread {
  int first;
  int between;
  int added;
};

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

// Outputs go through shared memory to Work::store(), each warp's rows by themselves.
template <typename Config, typename Work>
class StoredOutputs {
 public:
  using Sums = typename Multiplier<Config>::Sums;
  static constexpr bool kFetches = Work::kAdds != Adds::nothing;
  static constexpr bool kAddsBetween = Work::kAdds == Adds::before_epilogue;
  // An addend comes in so many parts, of as many outputs as there are buffers for.
  static constexpr int kParts = Config::kPieces / Config::kStoreBuffers;
  static_assert(!kAddsBetween || Config::kSets == 1, "a tile is complete before the next begins");
  static_assert(!kFetches || kAddsBetween || kParts == 1, "nobody would ask for the next part");

  // `group`: 0 or 1.
  __device__ __forceinline__ StoredOutputs(const GemmParams& p, Work& work,
                                           Multiplier<Config>& mine, uint32_t buffers,
                                           SharedBarriers<Config>& barriers, int group)
      : p_(p),
        work_(work),
        row_(mine.row()),
        column_(mine.column()),
        buffers_(buffers + group * Config::kStoreBuffers * Config::kStoreBytes),
        loaded_(shared_address(&barriers.loaded[group])),
        taken_(shared_address(&barriers.taken[group])) {
    if constexpr (Config::kIsScaled) scale_ = scale_of(p.epilogue);
  }

  // The first part of what is added, when the stores of the tile before have left its place.
  __device__ __forceinline__ void fetch() const {
    if (threadIdx.x % 32 == 0) {
      stores_read<0>();
      barrier_arrive(taken_);
    }
    __syncwarp();
  }
  // Evenly over the tile, so that each part has long been on its way when it is read. For the first
  // tile of a block, whose parts other ranks may send yet, at the end. Registers hold one addend:
  // of 16-bit operands the last one, before which the others are added, if there are stages enough
  // between them; of 8-bit ones the first, as sums are scaled before anything is added, and the
  // tensor cores keep some 14 bits of what they add to.
  __device__ __forceinline__ AddendSpread spread(const Unit& unit, bool is_first) const {
    constexpr int kLead = 4;  // stages in which the tile before is put, and a part comes
    constexpr int kMostAtEnd = 2;
    constexpr int kPlaces = 8;
    const int added = Config::kIsScaled ? 0 : work_.addends() - 1;
    const int places = (added + 1) * kParts + 1;  // one by which neighbouring tiles differ
    int between = max(0, unit.depth - kLead) / places;
    if (between == 0) return {unit.depth, 0, 0};
    if (is_first) {
      between = min(between, kMostAtEnd);
      return {unit.depth - places * between, between, added};
    }
    const int place = (unit.row / Config::kCluster + unit.column) % kPlaces;
    return {kLead + place * between / kPlaces, between, added};
  }
  __device__ __forceinline__ void add_early(Sums& sums, int part) {
    add(sums, part);
    read();
  }
  __device__ __forceinline__ void take(int part) {
    await_loaded();
#pragma unroll
    for (int j = 0; j < Config::kStoreBuffers; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices(matrix_row(buffers_ + j * Config::kStoreBytes, i),
                      held_[part * Config::kStoreBuffers + j][i]);
      }
    }
    read();
  }
  __device__ __forceinline__ void complete(const Unit& unit, Sums& sums) {
    scale(unit, sums);
    if constexpr (kAddsBetween) {
      add_held(sums);
      add_rest(sums);
      if (work_.factor() != 1.0F) multiply_by(work_.factor(), sums);
    }
    if (!p_.plain) {
#pragma unroll
      for (int i = 0; i < Config::kPieces; ++i) {
        apply_epilogue(p_, sums, i, unit.column * Config::kColumns + column_ + 64 * i);
      }
    }
    if constexpr (kFetches && !kAddsBetween) add(sums, 0);
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
  __device__ __forceinline__ void await_loaded() {
    barrier_wait(loaded_, phase_);
    phase_ ^= 1;
  }
  // A part, which makes room for the next one of the tile.
  __device__ __forceinline__ void read() {
    if (++read_ == work_.addends() * kParts) return;
    fence_shared_for_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(taken_);
  }
  __device__ __forceinline__ void add(Sums& sums, int part) {
    await_loaded();
#pragma unroll
    for (int j = 0; j < Config::kStoreBuffers; ++j) {
      add_from_shared<Config>(sums, part * Config::kStoreBuffers + j,
                              buffers_ + j * Config::kStoreBytes);
    }
  }
  __device__ __forceinline__ void add_held(Sums& sums) const {
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
      for (int i = 0; i < 4; ++i) add_pairs<Config>(sums, piece, i, held_[piece][i]);
    }
  }
  // The addends behind the one that is held.
  __device__ __forceinline__ void add_rest(Sums& sums) {
#pragma unroll 1
    while (read_ < work_.addends() * kParts) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        add(sums, part);
        read();
      }
    }
    read_ = 0;
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
  const int row_;
  const int column_;
  const uint32_t buffers_;
  const uint32_t loaded_;
  const uint32_t taken_;
  uint32_t phase_ = 0;  // of what is loaded
  float scale_ = 1.0F;  // of both operands
  int read_ = 0;        // parts of this tile
  uint32_t held_[kAddsBetween ? Config::kPieces : 1][4][4];
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
