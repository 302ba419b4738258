#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/multiplier.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"

// What becomes of the sums of a tile: what is added to them, the epilogue, and the way through
// shared memory to Work::store(). `Work`: see body.cuh.
namespace torch_overlap::sm90 {

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

}  // namespace torch_overlap::sm90
