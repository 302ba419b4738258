#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/stream_k.cuh"

// Products to which a matrix is added: shared along k, or not, where the piece of the row that
// clusters share has no stages. Outputs of a whole tile have buffers, into which the residual is
// loaded while the tile is multiplied.
namespace torch_overlap::sm90 {
namespace {

template <typename Config>
struct ResidualWork : StreamKWork<Config, false> {
  const CUtensorMap* map;
  uint32_t loaded;
  __device__ __forceinline__ const CUtensorMap* residual() const { return map; }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    residual_kernel(__grid_constant__ const ResidualParams p) {
  extern __shared__ char shared[];
  __shared__ uint64_t loaded[kMultiplyingWarps];
  ResidualWork<Config> work{{p.product}, &p.residual, shared_address(loaded)};
  run_gemm<Config>(p.product.gemm, work, shared);
}

struct ResidualKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(residual_kernel<Config>);
  }
};

}  // namespace

const KernelInfo* find_residual(const KernelKey& key) {
  return find_instance<ResidualKernel, Tile<128, 256, 2, 2, 4>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_residual(const KernelInfo& kernel, const ResidualParams& params, int blocks,
                            cudaStream_t stream) {
  return launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::sm90
