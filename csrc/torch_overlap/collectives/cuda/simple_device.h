#pragma once

// Simple exchanges: the data goes to the other ranks in 16-byte stores, followed by one flag per
// block and peer. The next round is sent while the current one is awaited. For .cu files.
#include "torch_overlap/collectives/cuda/protocol_device.h"

namespace torch_overlap::cuda {

inline constexpr int kVector = G::kVectorBytes;

// Stores this block's chunk of every part to the peer that receives it.
template <typename Case>
__device__ __forceinline__ void store_chunk(const CollectiveParams& p, const BlockState& state,
                                            uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    Words<4> data[Case::kMaxRanks];
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const int peer = rank_after<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= p.send_bytes[peer]) continue;
      data[k] = k > 1 && p.has_single_source
                    ? data[1]
                    : load_words<Case, 4>(p.send[peer] + at, p.send_bytes[peer] - at);
    }
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const int peer = rank_after<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= p.send_bytes[peer]) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_staged(simple_slot_of<Case>(p, peer, p.rank, epoch) + i * kVector, data[k]);
    }
  }
}

// Reduces this block's chunk of all ranks, in rank order.
template <typename T, typename Case>
__device__ __forceinline__ void reduce_chunk(const CollectiveParams& p, const BlockState& state,
                                             uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  const uint64_t bytes = p.send_bytes[0];
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    if (at >= bytes) break;
    const auto staged = [&](int source) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      return simple_slot_of<Case>(p, p.rank, source, epoch) + i * kVector;
    };
    const auto own = load_words<Case, 4>(p.send[p.rank] + at, bytes - at);
    store_words<Case>(p.recv[0] + at, reduce_vectors<T, Case>(p, own, staged), bytes - at);
  }
}

// Copies the chunk that every rank sent to this one, and this rank's own, to its destination.
template <typename Case>
__device__ __forceinline__ void copy_chunk(const CollectiveParams& p, const BlockState& state,
                                           uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    Words<4> data[Case::kMaxRanks];
    const auto is_due = [&](int k, int source) {
      if (k >= size_of<Case>(p) || at >= p.recv_bytes[source]) return false;
      return k > 0 || p.recv[source] != p.send[source];
    };
#pragma unroll
    for (int k = 0; k < Case::kMaxRanks; ++k) {
      const int source = rank_before<Case>(p, k);
      if (!is_due(k, source)) continue;
      if (k == 0) {
        data[k] = load_words<Case, 4>(p.send[source] + at, p.recv_bytes[source] - at);
      } else {
        const uint32_t epoch = state.epoch[source] + 1 + round;
        data[k] = load_staged(simple_slot_of<Case>(p, p.rank, source, epoch) + i * kVector);
      }
    }
#pragma unroll
    for (int k = 0; k < Case::kMaxRanks; ++k) {
      const int source = rank_before<Case>(p, k);
      if (!is_due(k, source)) continue;
      store_words<Case>(p.recv[source] + at, data[k], p.recv_bytes[source] - at);
    }
  }
}

// In every round, stores the data of the next round, waits for this one, and calls `take(state,
// chunk, round, is_good)`, which returns true to continue. Only then raises the flags of the next
// round: a flag waits for all stores before it, most of which have arrived by then. A block that
// may not send, or whose wait failed, calls take() for its last round with is_good = false.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange_rounds(const CollectiveParams& p, const BlockState& state,
                                                bool is_good, const Take& take) {
  if (is_good && blockIdx.x < p.max_chunks) {
    store_chunk<Case>(p, state, blockIdx.x, 0);
    __syncthreads();
    raise_flag(p, state, 0, 0);
  }
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.max_chunks; chunk += gridDim.x, ++round) {
    const uint32_t next = chunk + gridDim.x;
    if (is_good && next < p.max_chunks) store_chunk<Case>(p, state, next, round + 1);
    is_good = is_good && await_flags(p, state, 0, round);
    is_good = take(state, chunk, round, is_good);
    if (!is_good) break;
    if (next < p.max_chunks) raise_flag(p, state, 0, round + 1);
  }
}

// Runs a whole kernel.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange(const CollectiveParams& p, const Take& take) {
  __shared__ BlockState state;
  const bool is_good = begin_block(p, state);
  exchange_rounds<Case>(p, state, is_good, take);
  end_block(p, state);
}

}  // namespace torch_overlap::cuda
