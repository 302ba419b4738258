#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/persistent_gemm.cuh"
#include "torch_overlap/gemm/sm90/plain_policy.cuh"

// GEMMs to which a matrix is added. There are buffers for the outputs of a whole tile, into which
// the residual is loaded while the tile is multiplied.
namespace torch_overlap::sm90 {
namespace {

template <typename Config>
struct ResidualPolicy : PlainPolicy<Config> {
  static constexpr AddendPosition kAddendPosition = AddendPosition::after_epilogue;
  const CUtensorMap* map;
  __device__ __forceinline__ int addends() const { return 1; }
  __device__ __forceinline__ const CUtensorMap* addend(const WorkTile&, int) const { return map; }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    residual_kernel(__grid_constant__ const ResidualParams p) {
  extern __shared__ char shared[];
  ResidualPolicy<Config> policy{{p.product}, &p.residual};
  run_gemm<Config>(p.product, policy, shared);
}

struct ResidualKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(residual_kernel<Config>);
  }
};

}  // namespace

const KernelInfo* find_residual_kernel(const KernelKey& key) {
  return find_kernel_instance_any_layout<ResidualKernel, Tile<128, 256, 2, 2, 4>,
                                         Tile<128, 224, 2, 2, 4>, Tile<128, 192, 2, 2, 3, 2>,
                                         Tile<128, 128, 2, 1, 2>, Tile<64, 256, 1, 1, 2>>(key);
}

cudaError_t launch_residual(const KernelInfo& kernel, const ResidualParams& params, int blocks,
                            cudaStream_t stream) {
  return launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::sm90
