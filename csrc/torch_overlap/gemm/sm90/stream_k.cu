#include "torch_overlap/gemm/sm90/stream_k.cuh"

#include "torch_overlap/gemm/sm90/instance.cuh"

namespace torch_overlap::sm90 {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_k_kernel(__grid_constant__ const StreamKParams p) {
  extern __shared__ char shared[];
  StreamKWork<Config, true> work{p};
  run_gemm<Config>(p.gemm, work, shared);
}

struct StreamKKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(stream_k_kernel<Config>);
  }
};

}  // namespace

const KernelInfo* find_stream_k(const KernelKey& key) {
  return find_instance<StreamKKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_stream_k(const KernelInfo& kernel, const StreamKParams& params, int blocks,
                            cudaStream_t stream) {
  return launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::sm90
