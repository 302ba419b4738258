#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/epilogue.cuh"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"
#include "torch_overlap/gemm/sm90/wgmma.cuh"

// From stages in shared memory to sums in registers, and from there to outputs in shared memory:
// see body.cuh.
namespace torch_overlap::sm90 {

inline constexpr int kMultiplyingWarps = 8;

template <typename Config>
struct SharedBarriers {
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  // Of each warpgroup: a part of what is added to its outputs is there; and has been read, by its
  // four warps.
  uint64_t loaded[2];
  uint64_t taken[2];
};

template <typename Config>
__device__ __forceinline__ void init_stages(SharedBarriers<Config>& barriers) {
  for (int i = 0; i < Config::kStages; ++i) {
    barrier_init(shared_address(&barriers.full[i]), 1);
    barrier_init(shared_address(&barriers.empty[i]), kMultiplyingWarps * Config::kCluster);
  }
  for (uint64_t& barrier : barriers.loaded) barrier_init(shared_address(&barrier), 1);
  for (uint64_t& barrier : barriers.taken) {
    barrier_init(shared_address(&barrier), kMultiplyingWarps / 2);
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

// The stages that a warpgroup multiplies, one after the other over all tiles.
template <typename Config>
class Multiplier {
 public:
  using Sums = float[Config::kAccumulators];

  // group: 0 or 1.
  __device__ __forceinline__ Multiplier(uint32_t shared, SharedBarriers<Config>& barriers,
                                        int group)
      : shared_(shared),
        barriers_(barriers),
        row_(group / Config::kColumnGroups * 64),
        column_(group % Config::kColumnGroups * Config::kWidth) {}

  // Of this warpgroup's part in a tile.
  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int column() const { return column_; }

  // Begins the products of the next stage, when it has come. The first of a tile overwrites the
  // sums.
  __device__ __forceinline__ void begin(Sums& sums, bool is_first) {
    const int stage = at_.stage;
    barrier_wait(shared_address(&barriers_.full[stage]), at_.phase);
    at_.advance();
    const uint32_t lhs = shared_ + stage * Config::kStageBytes + row_ * 128;
    const uint32_t rhs = shared_ + stage * Config::kStageBytes + Config::kLhsBytes + column_ * 128;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      wgmma<!Config::kLhsAlongK, !Config::kRhsAlongK>(
          typename Config::In{}, Columns<Config::kWidth>{}, sums,
          operand<Config::kLhsAlongK, Config::kLhsBlock>(lhs, step),
          operand<Config::kRhsAlongK, Config::kRhsBlock>(rhs, step), !is_first || step != 0);
    }
    wgmma_commit();
    before_ = last_;
    last_ = stage;
  }
  // Waits for all but the stage begun last, and frees the one before it. Once for each stage, but
  // for those that end() has ended.
  __device__ __forceinline__ void end_before() {
    wgmma_wait<1>();
    release(before_);
  }
  // The same where that was the last one of a tile, whose sums may be read then.
  __device__ __forceinline__ void end_before(Sums& sums) {
    wgmma_wait<1>();
    hold(sums);
    release(before_);
  }
  // Waits for all. The sums may be read.
  __device__ __forceinline__ void end(Sums& sums) {
    wgmma_wait<0>();
    hold(sums);
    release(last_);
  }

 private:
  template <bool kAlongK, int kBlock>
  static __device__ __forceinline__ uint64_t operand(uint32_t address, int step) {
    if constexpr (kAlongK) return descriptor_k(address + step * 32);
    return descriptor_mn<kBlock>(address + step * kBlock * 32);
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
  int last_ = 0;
  int before_ = 0;
};

// 64 x 64 outputs of a warpgroup, two neighbours of a row in each register.
struct Rounded {
  uint32_t pairs[16];
};

template <typename Config>
__device__ __forceinline__ Rounded round_piece(const float (&sums)[Config::kAccumulators],
                                               int piece) {
  Rounded out;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int from = Config::piece_column(piece) / 2 + 2 * i;
    out.pairs[i] = pack(typename Config::Out{}, sums[from], sums[from + 1]);
  }
  return out;
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

// sums += pairs, which are those from 4 * i on of piece `chunk` of outputs.
template <typename Config>
__device__ __forceinline__ void add_pairs(float (&sums)[Config::kAccumulators], int chunk, int i,
                                          const uint32_t (&pairs)[4]) {
  const int first = Config::piece_column(chunk) / 2 + 8 * i;
  if (first < 32 * chunk) return;  // in the piece before too
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float a;
    float b;
    unpack(typename Config::Out{}, pairs[r], a, b);
    sums[first + 2 * r] += a;
    sums[first + 2 * r + 1] += b;
  }
}

// The same of all of a piece, which lies in shared memory as put_to_shared() would have put it
// there.
template <typename Config>
__device__ __forceinline__ void add_from_shared(float (&sums)[Config::kAccumulators], int chunk,
                                                uint32_t from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    load_matrices(matrix_row(from, i), pairs);
    add_pairs<Config>(sums, chunk, i, pairs);
  }
}

}  // namespace torch_overlap::sm90
