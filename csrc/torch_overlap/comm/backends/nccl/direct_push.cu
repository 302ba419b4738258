// Exchanges by push: the data as it is, in 16-byte stores to the other ranks, then one flag for
// each block and peer. While a round is waited for, the next one is on its way.
#include "torch_overlap/comm/backends/nccl/direct_device.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kVector = G::kVectorBytes;

// Stores this block's chunk of every part to the peer that it is for.
template <typename Case>
__device__ __forceinline__ void push_chunk(const DirectParams& p, const BlockState& state,
                                           uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  if (p.one_source) {
    for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
      const uint64_t at = (first + i) * kVector;
      if (at >= p.send_bytes[p.rank]) break;
      const auto data = load_words<Case, 4>(p.send[p.rank] + at, p.send_bytes[p.rank] - at);
      for (int k = 1; k < size_of<Case>(p); ++k) {
        const int peer = p.rank + k < size_of<Case>(p) ? p.rank + k : p.rank + k - size_of<Case>(p);
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        store_staged(vectors_of(p, peer, p.rank, epoch) + i * kVector, data);
      }
    }
    return;
  }
  for (int k = 1; k < size_of<Case>(p); ++k) {
    const int peer = p.rank + k < size_of<Case>(p) ? p.rank + k : p.rank + k - size_of<Case>(p);
    char* const to = vectors_of(p, peer, p.rank, state.epoch[peer] + 1 + round);
    for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
      const uint64_t at = (first + i) * kVector;
      if (at >= p.send_bytes[peer]) break;
      store_staged(to + i * kVector,
                   load_words<Case, 4>(p.send[peer] + at, p.send_bytes[peer] - at));
    }
  }
}

template <typename Case>
__device__ __forceinline__ void send_round(const DirectParams& p, const BlockState& state,
                                           uint32_t chunk, uint32_t round) {
  push_chunk<Case>(p, state, chunk, round);
  __syncthreads();
  raise_flag(p, state, 0, round);
}

// Every round: the next is sent, this one awaited and taken by `take(chunk, round)`.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange(const DirectParams& p, const Take& take) {
  __shared__ BlockState state;
  bool is_good = begin_block(p, state);
  if (is_good && blockIdx.x < p.most_chunks) send_round<Case>(p, state, blockIdx.x, 0);
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks && is_good; chunk += gridDim.x, ++round) {
    const uint32_t next = chunk + gridDim.x;
    if (next < p.most_chunks) send_round<Case>(p, state, next, round + 1);
    is_good = await_flags(p, state, 0, round);
    if (is_good) take(state, chunk, round);
  }
  end_block(p, state);
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads)
    push_reduce_kernel(const __grid_constant__ DirectParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round) {
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    const uint64_t bytes = p.send_bytes[0];
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
      const uint64_t at = (first + i) * kVector;
      if (at >= bytes) break;
      Words<4> words[Case::kMostRanks];
#pragma unroll
      for (int source = 0; source < Case::kMostRanks; ++source) {
        if (source >= size_of<Case>(p)) continue;
        if (source == p.rank) {
          words[source] = load_words<Case, 4>(p.send[p.rank] + at, bytes - at);
        } else {
          const uint32_t epoch = state.epoch[source] + 1 + round;
          words[source] = load_staged(vectors_of(p, p.rank, source, epoch) + i * kVector);
        }
      }
      Accumulator<Case, T, 4> sum;
      sum.start(words[0]);
#pragma unroll
      for (int source = 1; source < Case::kMostRanks; ++source) {
        if (source < size_of<Case>(p)) sum.add(p.op, words[source]);
      }
      store_words<Case>(p.recv[0] + at, sum.result(p.op, size_of<Case>(p)), bytes - at);
    }
  });
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads)
    push_copy_kernel(const __grid_constant__ DirectParams p) {
  exchange<Case>(p, [&p](const BlockState& state, uint32_t chunk, uint32_t round) {
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    for (int k = 0; k < size_of<Case>(p); ++k) {
      const int source = p.rank >= k ? p.rank - k : p.rank - k + size_of<Case>(p);
      const uint64_t bytes = p.recv_bytes[source];
      if (source == p.rank && p.recv[source] == p.send[source]) continue;
      const char* const staged =
          source == p.rank ? nullptr
                           : vectors_of(p, p.rank, source, state.epoch[source] + 1 + round);
#pragma unroll 2
      for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
        const uint64_t at = (first + i) * kVector;
        if (at >= bytes) break;
        const auto data = staged == nullptr ? load_words<Case, 4>(p.send[source] + at, bytes - at)
                                            : load_staged(staged + i * kVector);
        store_words<Case>(p.recv[source] + at, data, bytes - at);
      }
    }
  });
}

}  // namespace

cudaError_t launch_push_copy(const DirectParams& params, const DirectLaunch& launch) {
  return for_case(params, is_whole(params, kVector), [&](auto which) {
    return launch_direct(push_copy_kernel<decltype(which)>, params, launch);
  });
}

cudaError_t launch_push_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_direct(push_reduce_kernel<decltype(zero), decltype(which)>, params, launch);
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
