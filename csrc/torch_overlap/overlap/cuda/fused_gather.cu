#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/fused.h"

namespace torch_overlap::cuda {
namespace {

// Tiles of one chunk after the other, in the order in which they arrive: one schedule for all, so
// that no wave of blocks ends with a chunk.
template <typename Config>
class GatherUnits {
 public:
  __device__ __forceinline__ explicit GatherUnits(const FusedGatherParams& p)
      : p_(p),
        columns_(sm90::ceil_div(p.gemm.n, Config::kColumns)),
        depth_(sm90::ceil_div(p.gemm.k, Config::kDepth)),
        at_(static_cast<int>(blockIdx.x) / Config::kCluster) {}

  __device__ __forceinline__ bool next(sm90::Unit& unit) {
    while (step_ < p_.words.size) {
      const int chunk = p_.order[step_];
      const int rows = sm90::ceil_div(p_.rows[chunk], Config::kRows * Config::kCluster);
      if (at_ < rows * columns_) {
        unit = sm90::tile_at(at_, rows, columns_, p_.gemm.row_group, depth_);
        if constexpr (Config::kCluster > 1) {
          unit.row = unit.row * Config::kCluster + static_cast<int>(sm90::cluster_rank());
        }
        unit.chunk = chunk;
        at_ += static_cast<int>(gridDim.x) / Config::kCluster;
        return true;
      }
      at_ -= rows * columns_;
      ++step_;
    }
    return false;
  }

 private:
  const FusedGatherParams& p_;
  const int columns_;
  const int depth_;
  int step_ = 0;
  int at_;
};

template <typename Config>
struct GatherWork {
  static constexpr bool kFetches = false;
  static constexpr bool kAdds = false;
  const FusedGatherParams& p;
  int arrived;

  __device__ __forceinline__ GatherUnits<Config> units(const sm90::GemmParams&) {
    return GatherUnits<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const sm90::Unit& unit, int& row) {
    const int chunk = unit.chunk;
    if (chunk == p.words.rank) return &p.gemm.lhs;
    if (chunk != arrived) {
      await_word(p.words, p.flag[chunk], *p.words.epoch, WaitKind::chunk, chunk, p.control,
                 kManyLookAtHostNs);
      sm90::fence_global_for_copies();
      arrived = chunk;
    }
    row += p.begin[chunk];
    return &p.gathered;
  }
  __device__ __forceinline__ const float* lhs_scale(const sm90::Unit& unit, int& rows) const {
    rows = p.rows[unit.chunk];
    return p.lhs_scale[unit.chunk];
  }
  __device__ __forceinline__ void store(const sm90::Unit& unit, uint32_t from, int column,
                                        int row) {
    sm90::tensor_store(&p.out[unit.chunk], from, column, row);
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_gather_kernel(__grid_constant__ const FusedGatherParams p) {
  extern __shared__ char shared[];
  GatherWork<Config> work{p, -1};
  sm90::run_gemm<Config>(p.gemm, work, shared);
}

struct GatherKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_gather_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_gather(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_instance<GatherKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 224, 2, 2, 2>,
                             Tile<128, 192, 2, 2, 1, 2>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_gather(const sm90::KernelInfo& kernel, const FusedGatherParams& params,
                                int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
