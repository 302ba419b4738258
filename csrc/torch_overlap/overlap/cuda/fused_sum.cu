#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/plain_work.cuh"
#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/fused.h"

// The end of a GEMM + reduce-scatter whose tiles copy engines take to their owners: the product of
// the own rows, to which those of the other ranks are added before it is rounded, in the order of
// FusedSumParams. They come, a part of a tile at a time, to where outputs wait for their store,
// while it is multiplied:
//
//   a thread    3 told? a |        b |        2 told? a |         b |
//   multiplies  k ...     += a, k ... += b, k ...   reads a, k ...   reads b, k ... | += a, b
//
// Only that thread waits for other ranks.
namespace torch_overlap::cuda {
namespace {

template <typename Config>
struct SumWork : sm90::PlainWork<Config> {
  static constexpr sm90::Adds kAdds = sm90::Adds::before_epilogue;
  static_assert(kMostFusedRanks * kMostPieces <= 32);
  const FusedSumParams& all;
  uint32_t arrived;  // a bit for each piece of each source

  __device__ __forceinline__ int addends() const { return all.sources; }
  __device__ __forceinline__ float factor() const { return all.factor; }
  __device__ __forceinline__ const CUtensorMap* addend(const sm90::Unit& unit, int i) {
    const int last = min((unit.row + 1) * Config::kRows, all.gemm.m) - 1;
    const int piece = max(last, 0) / all.piece_rows;
    const uint32_t bit = 1U << (i * kMostPieces + piece);
    if ((arrived & bit) == 0) {
      await_word(all.words, all.told[i] + piece * all.flag_words, *all.words.epoch, WaitKind::chunk,
                 all.ranks[i], all.control, kManyLookAtHostNs);
      sm90::fence_global_for_copies();
      arrived |= bit;
    }
    return &all.from[i];
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_sum_kernel(__grid_constant__ const FusedSumParams p) {
  extern __shared__ char shared[];
  SumWork<Config> work{{p.gemm}, p, 0};
  sm90::run_gemm<Config>(p.gemm, work, shared);
}

struct SumKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_sum_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_sum(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_instance<SumKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_sum(const sm90::KernelInfo& kernel, const FusedSumParams& params,
                             int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
