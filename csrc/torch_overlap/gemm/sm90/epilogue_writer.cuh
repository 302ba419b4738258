#pragma once

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/mma_pipeline.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tile_scheduler.cuh"

// Handles the sums of a tile: addends, the epilogue, and the path through shared memory to
// GemmPolicy::store(). `GemmPolicy`: see persistent_gemm.cuh.
namespace torch_overlap::sm90 {

// Loads the addends of tiles, on one thread: part by part into the store buffers of each warpgroup,
// as soon as they are free. Another thread loads the stages of k, and does not wait for this one.
template <typename Config, typename GemmPolicy>
__device__ __forceinline__ void load_addends(const GemmParams& p, GemmPolicy& policy,
                                             uint32_t buffers, SharedBarriers<Config>& barriers) {
  uint32_t phase = 0;
  auto units = policy.units(p);
  WorkTile work_tile;
  while (units.next(work_tile)) {
    for (int i = 0; i < policy.addends(); ++i) {
      const CUtensorMap* const from = policy.addend(work_tile, i);
      for (int first = 0; first < Config::kPieces; first += Config::kStoreBuffers, phase ^= 1) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const uint32_t loaded = shared_address(&barriers.loaded[group]);
          barrier_wait(shared_address(&barriers.taken[group]), phase);
          barrier_arrive_expect_tx(loaded, Config::kStoreBuffers * Config::kStoreBytes);
#pragma unroll
          for (int j = 0; j < Config::kStoreBuffers; ++j) {
            tma_load_2d(buffers + (group * Config::kStoreBuffers + j) * Config::kStoreBytes, from,
                        loaded,
                        work_tile.column * Config::kColumns +
                            group % Config::kColumnGroups * Config::kWidth +
                            Config::piece_column(first + j),
                        work_tile.row * Config::kRows + group / Config::kColumnGroups * 64);
          }
        }
      }
    }
  }
}

// Schedule of the parts of addends: the first part is read after `first` stages of k, each further
// part `between` stages after the previous one. For the parts of the first `added` addends the MMAs
// are drained, and the part is added. The parts of the next addend are read into registers while
// MMAs are in flight. Any others are added after all MMAs.
struct AddendSchedule {
  int first;
  int between;
  int added;
};

// Writes outputs through shared memory to GemmPolicy::store(). Each warp writes its own rows.
template <typename Config, typename GemmPolicy>
class EpilogueWriter {
 public:
  using Sums = typename MmaPipeline<Config>::Sums;
  static constexpr bool kPrefetchesAddends = GemmPolicy::kAddendPosition != AddendPosition::none;
  static constexpr bool kAddsDuringMainloop =
      GemmPolicy::kAddendPosition == AddendPosition::before_epilogue;
  // Number of parts of an addend, each as large as the store buffers.
  static constexpr int kParts = Config::kPieces / Config::kStoreBuffers;
  static_assert(!kAddsDuringMainloop || Config::kNumAccumulatorSets == 1,
                "a tile is complete before the next begins");
  static_assert(!kPrefetchesAddends || kAddsDuringMainloop || kParts == 1,
                "nobody would ask for the next part");

  // `group`: 0 or 1.
  __device__ __forceinline__ EpilogueWriter(const GemmParams& p, GemmPolicy& policy,
                                            MmaPipeline<Config>& mma, uint32_t buffers,
                                            SharedBarriers<Config>& barriers, int group)
      : p_(p),
        policy_(policy),
        row_(mma.row()),
        column_(mma.column()),
        buffers_(buffers + group * Config::kStoreBuffers * Config::kStoreBytes),
        addend_full_(shared_address(&barriers.loaded[group])),
        addend_empty_(shared_address(&barriers.taken[group])) {
    if constexpr (Config::kIsScaled) scale_ = scale_of(p.epilogue);
  }

  // Requests the first part of the addends, after the stores of the previous tile have read its
  // buffers.
  __device__ __forceinline__ void fetch() const {
    if (threadIdx.x % 32 == 0) {
      bulk_wait_group_read<0>();
      barrier_arrive(addend_empty_);
    }
    __syncwarp();
  }
  // Spreads the parts evenly over the tile, so that each has had time to arrive when it is read. In
  // the first tile of a block they are read at the end, because other ranks may still be sending
  // them. Registers hold one addend. For 16-bit operands that is the last one; the others are added
  // before it, if there are enough stages between them. For 8-bit operands it is the first one,
  // because sums must be scaled before anything is added, and the tensor cores keep only about 14
  // bits of what they accumulate onto.
  __device__ __forceinline__ AddendSchedule schedule_addends(const WorkTile& work_tile,
                                                             bool is_first) const {
    constexpr int kLeadStages = 4;  // the previous tile is put and a part arrives in these
    constexpr int kMaxStagesBetween = 2;
    constexpr int kNumOffsets = 8;
    const int added = Config::kIsScaled ? 0 : policy_.addends() - 1;
    const int places = (added + 1) * kParts + 1;  // one more, to stagger neighbouring tiles
    int between = max(0, work_tile.depth - kLeadStages) / places;
    if (between == 0) return {work_tile.depth, 0, 0};
    if (is_first) {
      between = min(between, kMaxStagesBetween);
      return {work_tile.depth - places * between, between, added};
    }
    const int place = (work_tile.row / Config::kCluster + work_tile.column) % kNumOffsets;
    return {kLeadStages + place * between / kNumOffsets, between, added};
  }
  __device__ __forceinline__ void add_addend(Sums& sums, int part) {
    add(sums, part);
    read();
  }
  __device__ __forceinline__ void take(int part) {
    wait_addend();
#pragma unroll
    for (int j = 0; j < Config::kStoreBuffers; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix_x4(matrix_row_address(buffers_ + j * Config::kStoreBytes, i),
                    held_addend_[part * Config::kStoreBuffers + j][i]);
      }
    }
    read();
  }
  __device__ __forceinline__ void complete(const WorkTile& work_tile, Sums& sums) {
    scale(work_tile, sums);
    if constexpr (kAddsDuringMainloop) {
      add_held(sums);
      add_rest(sums);
      if (policy_.factor() != 1.0F) multiply_by(policy_.factor(), sums);
    }
    if (!p_.plain) {
#pragma unroll
      for (int i = 0; i < Config::kPieces; ++i) {
        apply_epilogue(p_, sums, i, work_tile.column * Config::kColumns + column_ + 64 * i);
      }
    }
    if constexpr (kPrefetchesAddends && !kAddsDuringMainloop) add(sums, 0);
  }
  __device__ __forceinline__ void store(const WorkTile& work_tile, const OutputFragment& fragment,
                                        int piece) const {
    const uint32_t to = buffers_ + piece % Config::kStoreBuffers * Config::kStoreBytes;
    const bool stores = threadIdx.x % 32 == 0;
    if (stores) bulk_wait_group_read<Config::kStoreBuffers - 1>();
    __syncwarp();
    store_to_shared(fragment, to);
    fence_proxy_async_shared();
    __syncwarp();
    if (!stores) return;
    policy_.store(work_tile, to + first_row() * 128, column_of(work_tile, piece),
                  work_tile.row * Config::kRows + row_ + first_row());
    bulk_commit_group();
  }
  static __device__ __forceinline__ void end() {
    if (threadIdx.x % 32 == 0) bulk_wait_group<0>();
  }

 private:
  __device__ __forceinline__ void scale(const WorkTile& work_tile, Sums& sums) const {
    if constexpr (Config::kIsScaled) {
      if (p_.epilogue.scaled_by_row) {
        int rows;
        const float* const scales = policy_.lhs_scale(work_tile, rows);
        const int first = work_tile.row * Config::kRows + row_;
        scale_by_row(p_, sums, scales + first, rows - first,
                     work_tile.column * Config::kColumns + column_);
      } else {
        multiply_by(scale_, sums);
      }
    }
  }
  __device__ __forceinline__ void wait_addend() {
    barrier_wait(addend_full_, phase_);
    phase_ ^= 1;
  }
  // Releases the buffers of a part that was read, for the next part of the tile.
  __device__ __forceinline__ void read() {
    if (++read_ == policy_.addends() * kParts) return;
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(addend_empty_);
  }
  __device__ __forceinline__ void add(Sums& sums, int part) {
    wait_addend();
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
      for (int i = 0; i < 4; ++i) add_pairs<Config>(sums, piece, i, held_addend_[piece][i]);
    }
  }
  // Adds the addends after the one in registers.
  __device__ __forceinline__ void add_rest(Sums& sums) {
#pragma unroll 1
    while (read_ < policy_.addends() * kParts) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        add(sums, part);
        read();
      }
    }
    read_ = 0;
  }
  // Returns the first row of this warp among those of its warpgroup.
  static __device__ __forceinline__ int first_row() {
    return static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
  }
  __device__ __forceinline__ int column_of(const WorkTile& work_tile, int piece) const {
    return work_tile.column * Config::kColumns + column_ + Config::piece_column(piece);
  }

  const GemmParams& p_;
  GemmPolicy& policy_;
  const int row_;
  const int column_;
  const uint32_t buffers_;
  const uint32_t addend_full_;
  const uint32_t addend_empty_;
  uint32_t phase_ = 0;  // of the loaded parts
  float scale_ = 1.0F;  // product of both operands' scales
  int read_ = 0;        // number of parts of this tile that were read
  uint32_t held_addend_[kAddsDuringMainloop ? Config::kPieces : 1][4][4];
};

}  // namespace torch_overlap::sm90
