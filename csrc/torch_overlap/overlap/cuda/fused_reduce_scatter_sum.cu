#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/persistent_gemm.cuh"
#include "torch_overlap/gemm/sm90/plain_policy.cuh"
#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/fused.h"

// Last part of a GEMM + reduce-scatter whose tiles copy engines send to their owners: the product
// of this rank's rows, to which the rows of the peers are added before rounding, in the order of
// FusedReduceScatterSumParams. Parts of tiles are loaded, while the product is computed, into the
// memory in which outputs are staged for their store:
//
//   a thread    flag 3? a |        b |        flag 2? a |         b |
//   multiplies  k ...     += a, k ... += b, k ...   reads a, k ...   reads b, k ... | += a, b
//
// Only that thread waits for other ranks.
namespace torch_overlap::cuda {
namespace {

template <typename Config>
struct SumPolicy : sm90::PlainPolicy<Config> {
  static constexpr sm90::AddendPosition kAddendPosition = sm90::AddendPosition::before_epilogue;
  static_assert(kMaxFusedRanks * kMaxPieces <= 32);
  const FusedReduceScatterSumParams& all;
  uint32_t arrived;  // One bit per piece of each source.

  __device__ __forceinline__ int addends() const { return all.sources; }
  __device__ __forceinline__ float factor() const { return all.factor; }
  __device__ __forceinline__ const CUtensorMap* addend(const sm90::WorkTile& work_tile, int i) {
    const int last = min((work_tile.row + 1) * Config::kRows, all.gemm.m) - 1;
    const int piece = max(last, 0) / all.piece_rows;
    const uint32_t bit = 1U << (i * kMaxPieces + piece);
    if ((arrived & bit) == 0) {
      await_word(all.words, all.notified[i] + piece * all.flag_words, *all.words.epoch,
                 WaitKind::chunk, all.ranks[i], all.control, kAllBlocksHostPollIntervalNs);
      sm90::fence_proxy_async_global();
      arrived |= bit;
    }
    return &all.from[i];
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_reduce_scatter_sum_kernel(__grid_constant__ const FusedReduceScatterSumParams p) {
  extern __shared__ char shared[];
  SumPolicy<Config> work{{p.gemm}, p, 0};
  sm90::run_gemm<Config>(p.gemm, work, shared);
}

struct SumKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_reduce_scatter_sum_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_reduce_scatter_sum(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_kernel_instance<SumKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 128, 2, 1, 2>>(
      key);
}

cudaError_t launch_fused_reduce_scatter_sum(const sm90::KernelInfo& kernel,
                                            const FusedReduceScatterSumParams& params, int blocks,
                                            cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
