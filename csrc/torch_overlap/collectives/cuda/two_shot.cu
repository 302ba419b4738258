// Two-shot all_reduce by Simple.
#include "torch_overlap/collectives/cuda/two_shot_device.h"

namespace torch_overlap::cuda {
namespace {

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    two_shot_kernel(const __grid_constant__ CollectiveParams p) {
  __shared__ BlockState state;
  const bool is_good = begin_block(p, state);
  two_shot_rounds<T, Case>(p, state, is_good);
  end_block(p, state);
}

}  // namespace

cudaError_t launch_two_shot(ReductionType type, const CollectiveParams& params,
                            const LaunchConfig& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_kernel(two_shot_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t load_two_shot_kernels() {
  return load_reductions([](auto zero, auto which) {
    return load_kernel(two_shot_kernel<decltype(zero), decltype(which)>);
  });
}

}  // namespace torch_overlap::cuda
