#pragma once

// Exchanges by push: the data as it is, in 16-byte stores to the other ranks, then one flag for
// each block and peer. While a round is waited for, the next one is on its way. For .cu files.
#include "torch_overlap/comm/backends/nccl/direct_device.h"

namespace torch_overlap::cuda {

inline constexpr int kVector = G::kVectorBytes;

// Stores this block's chunk of every part to the peer that it is for.
template <typename Case>
__device__ __forceinline__ void push_chunk(const DirectParams& p, const BlockState& state,
                                           uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    Words<4> data[Case::kMostRanks];
#pragma unroll
    for (int k = 1; k < Case::kMostRanks; ++k) {
      const int peer = rank_after<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= p.send_bytes[peer]) continue;
      data[k] = k > 1 && p.one_source
                    ? data[1]
                    : load_words<Case, 4>(p.send[peer] + at, p.send_bytes[peer] - at);
    }
#pragma unroll
    for (int k = 1; k < Case::kMostRanks; ++k) {
      const int peer = rank_after<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= p.send_bytes[peer]) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_staged(vectors_of<Case>(p, peer, p.rank, epoch) + i * kVector, data[k]);
    }
  }
}

// The reduction of what this block has of all ranks, in the order of ranks.
template <typename T, typename Case>
__device__ __forceinline__ void reduce_chunk(const DirectParams& p, const BlockState& state,
                                             uint32_t chunk, uint32_t round) {
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
}

// What every rank sent to this one, and this one to itself, to where it goes.
template <typename Case>
__device__ __forceinline__ void copy_chunk(const DirectParams& p, const BlockState& state,
                                           uint32_t chunk, uint32_t round) {
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
}

// Every round: the next is sent, this one awaited and taken by `take(state, chunk, round,
// is_good)`, which says whether to go on, and only then the next is announced: the flag waits for
// all stores before it, most of which have arrived by then. A block that may not send, or waits in
// vain, takes its last round with is_good = false.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange_rounds(const DirectParams& p, const BlockState& state,
                                                bool is_good, const Take& take) {
  if (is_good && blockIdx.x < p.most_chunks) {
    push_chunk<Case>(p, state, blockIdx.x, 0);
    __syncthreads();
    raise_flag(p, state, 0, 0);
  }
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks; chunk += gridDim.x, ++round) {
    const uint32_t next = chunk + gridDim.x;
    if (is_good && next < p.most_chunks) push_chunk<Case>(p, state, next, round + 1);
    is_good = is_good && await_flags(p, state, 0, round);
    is_good = take(state, chunk, round, is_good);
    if (!is_good) break;
    if (next < p.most_chunks) raise_flag(p, state, 0, round + 1);
  }
}

// All of a kernel.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange(const DirectParams& p, const Take& take) {
  __shared__ BlockState state;
  const bool is_good = begin_block(p, state);
  exchange_rounds<Case>(p, state, is_good, take);
  end_block(p, state);
}

}  // namespace torch_overlap::cuda
