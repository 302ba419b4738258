#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tile_scheduler.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// From stages in shared memory to sums in registers, and from there to outputs in shared memory:
// see persistent_gemm.cuh.
namespace torch_overlap::sm90 {

inline constexpr int kNumMmaWarps = 8;

template <typename Config>
struct SharedBarriers {
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  // Per warpgroup: `loaded`: a part of the addends has arrived; `taken`: its four warps have read
  // it.
  uint64_t loaded[2];
  uint64_t taken[2];
};

template <typename Config>
__device__ __forceinline__ void init_stages(SharedBarriers<Config>& barriers) {
  for (int i = 0; i < Config::kStages; ++i) {
    barrier_init(shared_address(&barriers.full[i]), 1);
    barrier_init(shared_address(&barriers.empty[i]), kNumMmaWarps * Config::kCluster);
  }
  for (uint64_t& barrier : barriers.loaded) barrier_init(shared_address(&barrier), 1);
  for (uint64_t& barrier : barriers.taken) {
    barrier_init(shared_address(&barrier), kNumMmaWarps / 2);
  }
}

// Position in the ring of stages: the index of the next stage, and the phase of its barriers.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The stages that a warpgroup multiplies, consecutively over all tiles.
template <typename Config>
class MmaPipeline {
 public:
  using Sums = float[Config::kAccumulators];

  // group: 0 or 1.
  __device__ __forceinline__ MmaPipeline(uint32_t shared, SharedBarriers<Config>& barriers,
                                         int group)
      : shared_(shared),
        barriers_(barriers),
        row_(group / Config::kColumnGroups * 64),
        column_(group % Config::kColumnGroups * Config::kWidth) {}

  // Position of this warpgroup's part in a tile.
  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int column() const { return column_; }

  // Waits for the next stage to arrive, and issues its MMAs. The first stage of a tile overwrites
  // the sums.
  __device__ __forceinline__ void begin(Sums& sums, bool is_first) {
    const int stage = at_.stage;
    barrier_wait(shared_address(&barriers_.full[stage]), at_.phase);
    at_.advance();
    const uint32_t lhs = shared_ + stage * Config::kStageBytes + row_ * 128;
    const uint32_t rhs = shared_ + stage * Config::kStageBytes + Config::kLhsBytes + column_ * 128;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      wgmma<!Config::kIsLhsKMajor, !Config::kIsRhsKMajor>(
          typename Config::In{}, WgmmaN<Config::kWidth>{}, sums,
          operand<Config::kIsLhsKMajor, Config::kLhsBlock>(lhs, step),
          operand<Config::kIsRhsKMajor, Config::kRhsBlock>(rhs, step), !is_first || step != 0);
    }
    wgmma_commit();
    before_ = last_;
    last_ = stage;
  }
  // Waits for all but the last stage that was begun, and releases the one before it. Must be called
  // once per stage, except for stages that end() waits for.
  __device__ __forceinline__ void wait_previous() {
    wgmma_wait<1>();
    release(before_);
  }
  // The same, if that was the last stage of a tile. Its sums may then be read.
  __device__ __forceinline__ void wait_previous(Sums& sums) {
    wgmma_wait<1>();
    warpgroup_fence_operand(sums);
    release(before_);
  }
  // Waits for all MMAs. The sums may then be read.
  __device__ __forceinline__ void end(Sums& sums) {
    wgmma_wait<0>();
    warpgroup_fence_operand(sums);
    release(last_);
  }

 private:
  template <bool kIsKMajor, int kBlock>
  static __device__ __forceinline__ uint64_t operand(uint32_t address, int step) {
    if constexpr (kIsKMajor) return make_k_major_descriptor(address + step * 32);
    return make_mn_major_descriptor<kBlock>(address + step * kBlock * 32);
  }
  __device__ __forceinline__ void release(int stage) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t empty = shared_address(&barriers_.empty[stage]);
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else {
      if (lane < Config::kCluster)
        mbarrier_arrive_cluster(empty, lane);  // every block of the cluster writes to this stage
    }
  }

  const uint32_t shared_;
  SharedBarriers<Config>& barriers_;
  const int row_;
  const int column_;
  PipelineState<Config::kStages> at_;
  int last_ = 0;
  int before_ = 0;
};

// 64 x 64 outputs of a warpgroup, two neighbours of a row per register.
struct OutputFragment {
  uint32_t pairs[16];
};

template <typename Config>
__device__ __forceinline__ OutputFragment
round_to_fragment(const float (&sums)[Config::kAccumulators], int piece) {
  OutputFragment out;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int from = Config::piece_column(piece) / 2 + 2 * i;
    out.pairs[i] = pack(typename Config::Out{}, sums[from], sums[from + 1]);
  }
  return out;
}

// Returns the address of this lane's row of four 8 x 8 matrices in 64 x 64 outputs under the
// 128-byte swizzle: the 16 rows of its warp by the columns 16 * i to 16 * i + 15. Register r of
// ldmatrix_x4() and stmatrix_x4() is then pairs[4 * i + r].
__device__ __forceinline__ uint32_t matrix_row_address(uint32_t outputs, int i) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
  return outputs + row * 128 + (((2 * i + lane / 16) ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store_to_shared(const OutputFragment& fragment, uint32_t to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) stmatrix_x4(matrix_row_address(to, i), fragment.pairs + 4 * i);
}

// sums += pairs, which are pairs 4 * i to 4 * i + 3 of piece `chunk` of the outputs.
template <typename Config>
__device__ __forceinline__ void add_pairs(float (&sums)[Config::kAccumulators], int chunk, int i,
                                          const uint32_t (&pairs)[4]) {
  const int first = Config::piece_column(chunk) / 2 + 8 * i;
  if (first < 32 * chunk) return;  // already in the previous piece
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float a;
    float b;
    unpack(typename Config::Out{}, pairs[r], a, b);
    sums[first + 2 * r] += a;
    sums[first + 2 * r + 1] += b;
  }
}

// The same for a whole piece in shared memory, in the layout of store_to_shared().
template <typename Config>
__device__ __forceinline__ void add_from_shared(float (&sums)[Config::kAccumulators], int chunk,
                                                uint32_t from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    ldmatrix_x4(matrix_row_address(from, i), pairs);
    add_pairs<Config>(sums, chunk, i, pairs);
  }
}

}  // namespace torch_overlap::sm90
