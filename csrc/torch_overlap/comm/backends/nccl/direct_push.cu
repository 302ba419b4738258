// Exchanges by push.
#include "torch_overlap/comm/backends/nccl/direct_push_device.h"

namespace torch_overlap::cuda {
namespace {

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm<Case>)
    push_reduce_kernel(const __grid_constant__ DirectParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    if (!is_good) return false;
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    const uint64_t bytes = p.send_bytes[0];
    for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
      const uint64_t at = (first + i) * kVector;
      if (at >= bytes) break;
      const auto staged = [&](int source) {
        const uint32_t epoch = state.epoch[source] + 1 + round;
        return vectors_of<Case>(p, p.rank, source, epoch) + i * kVector;
      };
      const auto own = load_words<Case, 4>(p.send[p.rank] + at, bytes - at);
      store_words<Case>(p.recv[0] + at, reduce_vectors<T, Case>(p, own, staged), bytes - at);
    }
    return true;
  });
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm<Case>)
    push_copy_kernel(const __grid_constant__ DirectParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    if (!is_good) return false;
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
      const uint64_t at = (first + i) * kVector;
      Words<4> data[Case::kMostRanks];
      const auto is_due = [&](int k, int source) {
        if (k >= size_of<Case>(p) || at >= p.recv_bytes[source]) return false;
        return k > 0 || p.recv[source] != p.send[source];
      };
#pragma unroll
      for (int k = 0; k < Case::kMostRanks; ++k) {
        const int source = rank_before<Case>(p, k);
        if (!is_due(k, source)) continue;
        if (k == 0) {
          data[k] = load_words<Case, 4>(p.send[source] + at, p.recv_bytes[source] - at);
        } else {
          const uint32_t epoch = state.epoch[source] + 1 + round;
          data[k] = load_staged(vectors_of<Case>(p, p.rank, source, epoch) + i * kVector);
        }
      }
#pragma unroll
      for (int k = 0; k < Case::kMostRanks; ++k) {
        const int source = rank_before<Case>(p, k);
        if (!is_due(k, source)) continue;
        store_words<Case>(p.recv[source] + at, data[k], p.recv_bytes[source] - at);
      }
    }
    return true;
  });
}

}  // namespace

cudaError_t launch_push_copy(const DirectParams& params, const DirectLaunch& launch) {
  return for_case(params, is_whole(params, kVector), [&](auto which) {
    return launch_direct(push_copy_kernel<decltype(which)>, launch, params);
  });
}

cudaError_t launch_push_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_direct(push_reduce_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t load_push_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(push_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    return load_kernel(push_reduce_kernel<decltype(zero), decltype(which)>);
  });
}

}  // namespace torch_overlap::cuda
