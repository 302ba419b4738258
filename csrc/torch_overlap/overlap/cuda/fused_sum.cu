#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/plain_work.cuh"
#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/fused.h"

// The end of a GEMM + reduce-scatter whose tiles copy engines take to their owners: the product of
// the own rows, to which those of the other ranks are added before it is rounded. They come as
// stages of their own, in the order of FusedSumParams, between the stages of k (8-bit operands:
// behind them):
//
//   loads       A0 B0 | A1 B1 | ... | 3 told? its rows 0-63 | 64-127 | A9 B9 | ... | 2 told? ...
//   multiplies  k = 0 | k = 1 | ... | sums += ...                    | k = 9 | ... | sums += ...
//
// Only the thread that loads waits for other ranks.
namespace torch_overlap::cuda {
namespace {

template <typename Config>
struct SumWork : sm90::PlainWork<Config> {
  static constexpr bool kAdds = true;
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
