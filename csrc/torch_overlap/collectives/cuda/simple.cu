// Simple collectives.
#include "torch_overlap/collectives/cuda/simple_device.h"

namespace torch_overlap::cuda {
namespace {

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    simple_reduce_kernel(const __grid_constant__ CollectiveParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    if (is_good) reduce_chunk<T, Case>(p, state, chunk, round);
    return is_good;
  });
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    simple_copy_kernel(const __grid_constant__ CollectiveParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    if (is_good) copy_chunk<Case>(p, state, chunk, round);
    return is_good;
  });
}

}  // namespace

cudaError_t launch_simple_copy(const CollectiveParams& params, const LaunchConfig& launch) {
  return for_case(params, is_unit_aligned(params, kVector), [&](auto which) {
    return launch_kernel(simple_copy_kernel<decltype(which)>, launch, params);
  });
}

cudaError_t launch_simple_reduce(ReductionType type, const CollectiveParams& params,
                                 const LaunchConfig& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_kernel(simple_reduce_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t load_simple_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(simple_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    return load_kernel(simple_reduce_kernel<decltype(zero), decltype(which)>);
  });
}

}  // namespace torch_overlap::cuda
