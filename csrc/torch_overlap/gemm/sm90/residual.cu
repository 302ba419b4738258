#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/plain_work.cuh"

// Products to which a matrix is added. Outputs of a whole tile have buffers, into which the
// residual is loaded while the tile is multiplied.
namespace torch_overlap::sm90 {
namespace {

constexpr int kMultiplyingWarps = 8;  // behind the four of the first warpgroup

template <typename Config>
struct ResidualWork : PlainWork<Config> {
  static constexpr bool kFetches = true;
  const CUtensorMap* map;
  uint32_t barriers;
  __device__ __forceinline__ const CUtensorMap* residual() const { return map; }
  __device__ __forceinline__ uint32_t loaded() const {
    return barriers + (threadIdx.x / 32 - 4) * sizeof(uint64_t);
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    residual_kernel(__grid_constant__ const ResidualParams p) {
  extern __shared__ char shared[];
  __shared__ uint64_t loaded[kMultiplyingWarps];
  if (threadIdx.x == 0) {  // as run_gemm() inits the others, which fences them all
    for (uint64_t& barrier : loaded) barrier_init(shared_address(&barrier), 1);
  }
  ResidualWork<Config> work{{p.product}, &p.residual, shared_address(loaded)};
  run_gemm<Config>(p.product, work, shared);
}

struct ResidualKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(residual_kernel<Config>);
  }
};

}  // namespace

const KernelInfo* find_residual(const KernelKey& key) {
  return find_any_instance<ResidualKernel, Tile<128, 256, 2, 2, 4>, Tile<128, 224, 2, 2, 4>,
                           Tile<128, 192, 2, 2, 3, 2>, Tile<128, 128, 2, 1, 2>,
                           Tile<64, 256, 1, 1, 2>>(key);
}

cudaError_t launch_residual(const KernelInfo& kernel, const ResidualParams& params, int blocks,
                            cudaStream_t stream) {
  return launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::sm90
