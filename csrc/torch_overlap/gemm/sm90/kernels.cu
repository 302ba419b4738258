#include "torch_overlap/gemm/sm90/kernels.h"

#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/persistent_gemm.cuh"
#include "torch_overlap/gemm/sm90/plain_policy.cuh"

namespace torch_overlap::sm90 {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_kernel(__grid_constant__ const GemmParams p) {
  extern __shared__ char shared[];
  PlainPolicy<Config> policy{p};
  run_gemm<Config>(p, policy, shared);
}

struct PlainKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(gemm_kernel<Config>);
  }
};

}  // namespace

const KernelInfo* find_kernel(const KernelKey& key) {
  return find_kernel_instance_any_layout<PlainKernel, Tile<128, 256, 2, 2, 2>,
                                         Tile<128, 224, 2, 2, 2>, Tile<128, 192, 2, 2, 1, 2>,
                                         Tile<128, 128, 2, 1, 2>, Tile<64, 256, 1, 1, 2>>(key);
}

cudaError_t launch_gemm(const KernelInfo& kernel, const GemmParams& params, int blocks,
                        cudaStream_t stream) {
  return launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::sm90
