// Zero-copy collectives: tensors in a window are written, or in a reduction read, in place.
#include "torch_overlap/collectives/cuda/ll_device.h"
#include "torch_overlap/collectives/cuda/two_shot_device.h"

namespace torch_overlap::cuda {
namespace {

// Number of vectors of each rank that a thread has in flight.
template <typename Case>
constexpr int kDepth = Case::kMaxRanks <= 4 ? 4 : 2;

// --- Exchange of locations -----------------------------------------------------------------------

// Addresses of the peers' tensors, and the state of a block. In shared memory.
struct PeerTensors {
  BlockState state;
  char* tensor[G::kMaxRanks];  // of each rank, in this process
};

enum class Outcome : uint8_t { failed, different_windows, same_window };

__device__ __forceinline__ char* location_of(const CollectiveParams& p, int owner, int source,
                                             uint32_t epoch) {
  const size_t index = epoch % G::kLLSlots * G::kMaxRanks + source;
  return p.base[owner] + CollectiveLayout::kLocations +
         blockIdx.x * CollectiveLayout::kLocationBytesPerBlock + index * G::kLLPacketBytes;
}

// Exchanges one LL packet between every two ranks, even if they have no data for each other. The
// packet also allows the peer to access this rank's tensor: earlier work on the stream has
// completed. All ranks see the same packets, so all blocks of all ranks get the same outcome.
__device__ __forceinline__ Outcome exchange_locations(const CollectiveParams& p,
                                                      const WindowPlacement& window,
                                                      PeerTensors& peers) {
  const auto peer = static_cast<int>(threadIdx.x);
  bool failed = false;
  bool is_other_window = false;
  if (peer == p.rank) {
    peers.tensor[peer] = window.base[peer] + window.offset;
    is_other_window = window.number == 0;
  } else if (peer < p.size) {
    const uint32_t epoch = ++peers.state.epoch[peer];
    LLPacketView packet{};
    packet.data.at[0] = window.number;
    packet.data.at[1] = static_cast<uint32_t>(window.offset);
    packet.data.at[2] = static_cast<uint32_t>(window.offset >> 32);
    packet.epoch = epoch;
    fence_system();
    store_ll(location_of(p, peer, p.rank, epoch), packet);
    const char* const from = location_of(p, p.rank, peer, epoch);
    packet = load_ll(from);
    failed = await_ll(p, packet, from, peer, epoch);
    fence_system();
    is_other_window = packet.data.at[0] != window.number;
    const uint64_t offset = packet.data.at[1] | static_cast<uint64_t>(packet.data.at[2]) << 32;
    peers.tensor[peer] = window.base[peer] + offset;
  }
  if (__syncthreads_or(failed) != 0) return Outcome::failed;
  return __syncthreads_or(is_other_window) != 0 ? Outcome::different_windows : Outcome::same_window;
}

// Waits until every rank has completed its accesses, by a round of flags between every two ranks.
__device__ __forceinline__ void exit_barrier(const CollectiveParams& p, PeerTensors& peers) {
  __syncthreads();
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer >= p.size || peer == p.rank) return;
  const uint32_t epoch = ++peers.state.epoch[peer];
  store_release(flag_of(p, 0, peer, p.rank), epoch);
  (void)await_flag(p, 0, peer, epoch);
}

// Runs a whole kernel: in_place(peers) if the tensors are in one window, else staged(state).
template <typename InPlace, typename Staged>
__device__ __forceinline__ void run_block(const CollectiveParams& p, const WindowPlacement& window,
                                          const InPlace& in_place, const Staged& staged) {
  __shared__ PeerTensors peers;
  const bool is_good = begin_block(p, peers.state);
  const Outcome outcome = is_good ? exchange_locations(p, window, peers) : Outcome::failed;
  if (outcome == Outcome::different_windows) staged(peers.state);
  if (outcome == Outcome::same_window) {
    in_place(peers);
    exit_barrier(p, peers);
  }
  end_block(p, peers.state, outcome == Outcome::different_windows);
}

// --- Work ----------------------------------------------------------------------------------------

// A thread's vectors begin at first_of_thread() and follow each other at this stride.
__device__ __forceinline__ uint64_t stride_of_grid() {
  return static_cast<uint64_t>(gridDim.x) * blockDim.x * kVector;
}

__device__ __forceinline__ uint64_t first_of_thread() {
  return (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
}

// Copies send[r] to its place in the tensor of rank r.
template <typename Case>
__device__ __forceinline__ void write_to_peers(const CollectiveParams& p,
                                               const WindowPlacement& window,
                                               const PeerTensors& peers) {
  constexpr int kDeep = kDepth<Case>;
  const uint64_t bytes = p.send_bytes[rank_after<Case>(p, 1)];
  const uint64_t stride = stride_of_grid();
  const bool keeps_own = p.recv[p.rank] != nullptr && p.recv[p.rank] != p.send[p.rank];
  for (uint64_t first = first_of_thread(); first < bytes; first += kDeep * stride) {
    Words<4> data[kDeep];
#pragma unroll
    for (int k = 0; k < Case::kMaxRanks; ++k) {
      if (k >= size_of<Case>(p)) continue;
      const int peer = rank_after<Case>(p, k);
      if (k == 0 || !p.has_single_source) {
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
          const uint64_t at = first + i * stride;
          if (at < bytes) data[i] = load_words<Case, 4>(p.send[peer] + at, kVector);
        }
      }
      if (k == 0 && !keeps_own) continue;
      char* const to = k == 0 ? p.recv[peer] : peers.tensor[peer] + window.place;
#pragma unroll
      for (int i = 0; i < kDeep; ++i) {
        const uint64_t at = first + i * stride;
        if (at < bytes) store_staged(to + at, data[i]);
      }
    }
  }
}

// Reduces `bytes` of every rank's tensor, from `place` on, into `out`. kToPeers: also into the same
// place of all other ranks.
template <typename T, typename Case, bool kToPeers>
__device__ __forceinline__ void read_from_peers(const CollectiveParams& p, const PeerTensors& peers,
                                                uint64_t place, uint64_t bytes, const char* own,
                                                char* out) {
  constexpr int kDeep = kDepth<Case> / 2;
  const uint64_t stride = stride_of_grid();
  for (uint64_t first = first_of_thread(); first < bytes; first += kDeep * stride) {
    Words<4> seen[kDeep][Case::kMaxRanks];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      const uint64_t at = first + i * stride;
      if (at >= bytes) continue;
      const auto of_peer = [&](int source) { return peers.tensor[source] + place + at; };
      load_vectors<Case>(p, load_words<Case, 4>(own + at, kVector), seen[i], of_peer);
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      const uint64_t at = first + i * stride;
      if (at >= bytes) continue;
      const auto sum = accumulate<T, Case>(p, seen[i]).result(p.op, size_of<Case>(p));
      store_staged(out + at, sum);
      if constexpr (kToPeers) {
#pragma unroll
        for (int k = 1; k < Case::kMaxRanks; ++k) {
          if (k >= size_of<Case>(p)) continue;
          store_staged(peers.tensor[rank_after<Case>(p, k)] + place + at, sum);
        }
      }
    }
  }
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    zero_copy_kernel(const __grid_constant__ CollectiveParams p,
                     const __grid_constant__ WindowPlacement window) {
  run_block(
      p, window, [&](const PeerTensors& peers) { write_to_peers<Case>(p, window, peers); },
      [&](const BlockState& state) {
        const auto take = [&p](const BlockState& now, uint32_t chunk, uint32_t round,
                               bool is_good) {
          if (is_good) copy_chunk<Case>(p, now, chunk, round);
          return is_good;
        };
        exchange_rounds<Case>(p, state, true, take);
      });
}

template <typename T, typename Case>
__device__ __forceinline__ void reduce_rounds(const CollectiveParams& p, const BlockState& state) {
  const auto take = [&p](const BlockState& now, uint32_t chunk, uint32_t round, bool is_good) {
    if (is_good) reduce_chunk<T, Case>(p, now, chunk, round);
    return is_good;
  };
  exchange_rounds<Case>(p, state, true, take);
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    zero_copy_reduce_kernel(const __grid_constant__ CollectiveParams p,
                            const __grid_constant__ WindowPlacement window) {
  run_block(
      p, window,
      [&](const PeerTensors& peers) {
        read_from_peers<T, Case, false>(p, peers, window.place, p.send_bytes[0], p.send[p.rank],
                                        p.recv[0]);
      },
      [&](const BlockState& state) { reduce_rounds<T, Case>(p, state); });
}

// Reduces in place: only one thread, of the owner, reads and then writes each element.
template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    zero_copy_all_reduce_kernel(const __grid_constant__ CollectiveParams p,
                                const __grid_constant__ WindowPlacement window) {
  run_block(
      p, window,
      [&](const PeerTensors& peers) {
        const uint64_t all = p.send_bytes[0];
        const uint64_t each = (all / kVector + size_of<Case>(p) - 1) / size_of<Case>(p) * kVector;
        const uint64_t begin = min(p.rank * each, all);
        read_from_peers<T, Case, true>(p, peers, begin, min(each, all - begin), p.send[0] + begin,
                                       p.recv[0] + begin);
      },
      [&](const BlockState& state) {
        if constexpr (Case::kMaxRanks == 2) {
          reduce_rounds<T, Case>(p, state);
        } else {
          two_shot_rounds<T, Case>(p, state, true);
        }
      });
}

}  // namespace

cudaError_t launch_zero_copy(const CollectiveParams& params, const WindowPlacement& window,
                             const LaunchConfig& launch) {
  return for_case(params, is_unit_aligned(params, kVector), [&](auto which) {
    return launch_kernel(zero_copy_kernel<decltype(which)>, launch, params, window);
  });
}

cudaError_t launch_zero_copy_reduce(ReductionType type, const CollectiveParams& params,
                                    const WindowPlacement& window, const LaunchConfig& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_kernel(zero_copy_reduce_kernel<decltype(zero), decltype(which)>, launch, params,
                         window);
  });
}

cudaError_t launch_zero_copy_all_reduce(ReductionType type, const CollectiveParams& params,
                                        const WindowPlacement& window, const LaunchConfig& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_kernel(zero_copy_all_reduce_kernel<decltype(zero), decltype(which)>, launch,
                         params, window);
  });
}

cudaError_t load_zero_copy_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(zero_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    using T = decltype(zero);
    using Case = decltype(which);
    const cudaError_t loaded = load_kernel(zero_copy_reduce_kernel<T, Case>);
    return loaded == cudaSuccess ? load_kernel(zero_copy_all_reduce_kernel<T, Case>) : loaded;
  });
}

}  // namespace torch_overlap::cuda
