#pragma once

// Two-shot all_reduce by Simple: slices go to their owners, and the sums to all ranks. Each of n
// ranks sends 2 (n - 1) / n times the message; one-shot Simple sends it n - 1 times. For .cu files.
#include "torch_overlap/collectives/cuda/simple_device.h"

namespace torch_overlap::cuda {

// Slices go to the first half of a slot, sums to the second.
inline constexpr size_t kSumsAt = CollectiveLayout::simple_bytes_per_rank() / 2;

template <typename Case>
__device__ __forceinline__ void send_slices(const CollectiveParams& p, const BlockState& state,
                                            uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    Words<4> data[Case::kMaxRanks];
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const Slice slice = slice_of(p, rank_after<Case>(p, k));
      if (k >= size_of<Case>(p) || at >= slice.bytes) continue;
      data[k] = load_words<Case, 4>(p.send[0] + slice.begin + at, slice.bytes - at);
    }
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const int peer = rank_after<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= slice_of(p, peer).bytes) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_staged(simple_slot_of<Case>(p, peer, p.rank, epoch) + i * kVector, data[k]);
    }
  }
}

template <typename T, typename Case>
__device__ __forceinline__ void send_sums(const CollectiveParams& p, const BlockState& state,
                                          uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  const Slice slice = slice_of(p, p.rank);
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    if (at >= slice.bytes) break;
    const auto staged = [&](int source) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      return simple_slot_of<Case>(p, p.rank, source, epoch) + i * kVector;
    };
    const auto own = load_words<Case, 4>(p.send[0] + slice.begin + at, slice.bytes - at);
    const auto sum = reduce_vectors<T, Case>(p, own, staged);
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      if (k >= size_of<Case>(p)) continue;
      const int peer = rank_after<Case>(p, k);
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_staged(simple_slot_of<Case>(p, peer, p.rank, epoch) + kSumsAt + i * kVector, sum);
    }
    store_words<Case>(p.recv[0] + slice.begin + at, sum, slice.bytes - at);
  }
}

// Notifies the peers, after a barrier, that the sums of a round and the slices of the next round,
// if there is one, have arrived.
__device__ __forceinline__ void announce(const CollectiveParams& p, const BlockState& state,
                                         uint32_t round) {
  if (!has_peer_in_round(p, round)) return;
  const auto peer = static_cast<int>(threadIdx.x);
  const uint32_t epoch = state.epoch[peer] + 1 + round;
  fence_system();
  store_relaxed(flag_of(p, 1, peer, p.rank), epoch);
  if (has_peer_in_round(p, round + 1)) store_relaxed(flag_of(p, 0, peer, p.rank), epoch + 1);
}

template <typename Case>
__device__ __forceinline__ void take_sums(const CollectiveParams& p, const BlockState& state,
                                          uint32_t chunk, uint32_t round) {
  const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
  for (uint32_t i = threadIdx.x; i < p.chunk; i += blockDim.x) {
    const uint64_t at = (first + i) * kVector;
    Words<4> data[Case::kMaxRanks];
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const int source = rank_before<Case>(p, k);
      if (k >= size_of<Case>(p) || at >= slice_of(p, source).bytes) continue;
      const uint32_t epoch = state.epoch[source] + 1 + round;
      data[k] = load_staged(simple_slot_of<Case>(p, p.rank, source, epoch) + kSumsAt + i * kVector);
    }
#pragma unroll
    for (int k = 1; k < Case::kMaxRanks; ++k) {
      const Slice slice = slice_of(p, rank_before<Case>(p, k));
      if (k >= size_of<Case>(p) || at >= slice.bytes) continue;
      store_words<Case>(p.recv[0] + slice.begin + at, data[k], slice.bytes - at);
    }
  }
}

// The sums of a round are received one round later. Flags are raised last, when the data that they
// announce has arrived, so a block waits neither for its own stores nor for a round trip to a peer.
template <typename T, typename Case>
__device__ __forceinline__ void two_shot_rounds(const CollectiveParams& p, const BlockState& state,
                                                bool is_good) {
  if (is_good && blockIdx.x < p.max_chunks) {
    send_slices<Case>(p, state, blockIdx.x, 0);
    __syncthreads();
    raise_flag(p, state, 0, 0);
  }
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.max_chunks && is_good; chunk += gridDim.x, ++round) {
    const uint32_t next = chunk + gridDim.x;
    if (next < p.max_chunks) send_slices<Case>(p, state, next, round + 1);
    is_good = await_flags(p, state, 0, round);
    if (!is_good) break;
    send_sums<T, Case>(p, state, chunk, round);
    if (round > 0) {
      is_good = await_flags(p, state, 1, round - 1);
      if (!is_good) break;
      take_sums<Case>(p, state, chunk - gridDim.x, round - 1);
    } else {
      __syncthreads();
    }
    announce(p, state, round);
  }
  if (is_good && round > 0 && await_flags(p, state, 1, round - 1)) {
    take_sums<Case>(p, state, blockIdx.x + (round - 1) * gridDim.x, round - 1);
  }
}

}  // namespace torch_overlap::cuda
