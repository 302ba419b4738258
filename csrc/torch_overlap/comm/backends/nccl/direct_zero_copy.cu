// Exchanges between tensors that lie in a window: written, or in a reduction read, where they are.
#include "torch_overlap/comm/backends/nccl/direct_line_device.h"
#include "torch_overlap/comm/backends/nccl/direct_two_shot_device.h"

namespace torch_overlap::cuda {
namespace {

// Vectors that a thread has on their way at once, of each rank.
template <typename Case>
constexpr int kDepth = Case::kMostRanks <= 4 ? 4 : 2;

// --- Meeting -------------------------------------------------------------------------------------

// What a block knows of the others. In shared memory.
struct Meeting {
  BlockState state;
  char* tensor[G::kMostRanks];  // of each rank, as this process sees it
};

enum class Outcome : uint8_t { failed, apart, together };

__device__ __forceinline__ char* place_of(const DirectParams& p, int owner, int source,
                                          uint32_t epoch) {
  const size_t line = epoch % G::kLineSlots * G::kMostRanks + source;
  return p.base[owner] + DirectLayout::kPlaces + blockIdx.x * DirectLayout::kPlacesOfOneBlock +
         line * G::kLineBytes;
}

// A round of one line between every two ranks, whatever they have to say to each other otherwise.
// It also tells the peer that it may touch this rank's tensor: what was before on the stream is
// done. All ranks see the same lines, and so all blocks of all ranks come to the same outcome.
__device__ __forceinline__ Outcome meet(const DirectParams& p, const DirectWindow& window,
                                        Meeting& meeting) {
  const auto peer = static_cast<int>(threadIdx.x);
  bool failed = false;
  bool is_apart = false;
  if (peer == p.rank) {
    meeting.tensor[peer] = window.base[peer] + window.offset;
    is_apart = window.number == 0;
  } else if (peer < p.size) {
    const uint32_t epoch = ++meeting.state.epoch[peer];
    LineView line{};
    line.data.at[0] = window.number;
    line.data.at[1] = static_cast<uint32_t>(window.offset);
    line.data.at[2] = static_cast<uint32_t>(window.offset >> 32);
    line.epoch = epoch;
    fence_system();
    store_line(place_of(p, peer, p.rank, epoch), line);
    const char* const from = place_of(p, p.rank, peer, epoch);
    line = load_line(from);
    failed = await_line(p, line, from, peer, epoch);
    fence_system();
    is_apart = line.data.at[0] != window.number;
    const uint64_t offset = line.data.at[1] | static_cast<uint64_t>(line.data.at[2]) << 32;
    meeting.tensor[peer] = window.base[peer] + offset;
  }
  if (__syncthreads_or(failed) != 0) return Outcome::failed;
  return __syncthreads_or(is_apart) != 0 ? Outcome::apart : Outcome::together;
}

// Every rank has touched all that it touches. A round of flags between every two ranks.
__device__ __forceinline__ void part(const DirectParams& p, Meeting& meeting) {
  __syncthreads();
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer >= p.size || peer == p.rank) return;
  const uint32_t epoch = ++meeting.state.epoch[peer];
  store_release(flag_of(p, 0, peer, p.rank), epoch);
  (void)await_flag(p, 0, peer, epoch);
}

// The whole of a kernel: direct(meeting) where the tensors lie in one window, else staged(state).
template <typename Direct, typename Staged>
__device__ __forceinline__ void run_block(const DirectParams& p, const DirectWindow& window,
                                          const Direct& direct, const Staged& staged) {
  __shared__ Meeting meeting;
  const bool is_good = begin_block(p, meeting.state);
  const Outcome outcome = is_good ? meet(p, window, meeting) : Outcome::failed;
  if (outcome == Outcome::apart) staged(meeting.state);
  if (outcome == Outcome::together) {
    direct(meeting);
    part(p, meeting);
  }
  end_block(p, meeting.state, outcome == Outcome::apart);
}

// --- Work ----------------------------------------------------------------------------------------

// A thread's vectors: from its first one on, one in each stride.
__device__ __forceinline__ uint64_t stride_of_grid() {
  return static_cast<uint64_t>(gridDim.x) * blockDim.x * kVector;
}

__device__ __forceinline__ uint64_t first_of_thread() {
  return (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
}

// send[r] to its place in the tensor of rank r.
template <typename Case>
__device__ __forceinline__ void write_to_peers(const DirectParams& p, const DirectWindow& window,
                                               const Meeting& meeting) {
  constexpr int kDeep = kDepth<Case>;
  const uint64_t bytes = p.send_bytes[rank_after<Case>(p, 1)];
  const uint64_t stride = stride_of_grid();
  const bool keeps_own = p.recv[p.rank] != nullptr && p.recv[p.rank] != p.send[p.rank];
  for (uint64_t first = first_of_thread(); first < bytes; first += kDeep * stride) {
    Words<4> data[kDeep];
#pragma unroll
    for (int k = 0; k < Case::kMostRanks; ++k) {
      if (k >= size_of<Case>(p)) continue;
      const int peer = rank_after<Case>(p, k);
      if (k == 0 || !p.one_source) {
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
          const uint64_t at = first + i * stride;
          if (at < bytes) data[i] = load_words<Case, 4>(p.send[peer] + at, kVector);
        }
      }
      if (k == 0 && !keeps_own) continue;
      char* const to = k == 0 ? p.recv[peer] : meeting.tensor[peer] + window.place;
#pragma unroll
      for (int i = 0; i < kDeep; ++i) {
        const uint64_t at = first + i * stride;
        if (at < bytes) store_staged(to + at, data[i]);
      }
    }
  }
}

// The reduction of `bytes` of every rank's tensor, from `place` on, to `out`, and if kToPeers to
// the same place of all others.
template <typename T, typename Case, bool kToPeers>
__device__ __forceinline__ void read_from_peers(const DirectParams& p, const Meeting& meeting,
                                                uint64_t place, uint64_t bytes, const char* own,
                                                char* out) {
  constexpr int kDeep = kDepth<Case> / 2;
  const uint64_t stride = stride_of_grid();
  for (uint64_t first = first_of_thread(); first < bytes; first += kDeep * stride) {
    Words<4> seen[kDeep][Case::kMostRanks];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      const uint64_t at = first + i * stride;
      if (at >= bytes) continue;
      const auto of_peer = [&](int source) { return meeting.tensor[source] + place + at; };
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
        for (int k = 1; k < Case::kMostRanks; ++k) {
          if (k >= size_of<Case>(p)) continue;
          store_staged(meeting.tensor[rank_after<Case>(p, k)] + place + at, sum);
        }
      }
    }
  }
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm<Case>)
    zero_copy_kernel(const __grid_constant__ DirectParams p,
                     const __grid_constant__ DirectWindow window) {
  run_block(
      p, window, [&](const Meeting& meeting) { write_to_peers<Case>(p, window, meeting); },
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
__device__ __forceinline__ void reduce_rounds(const DirectParams& p, const BlockState& state) {
  const auto take = [&p](const BlockState& now, uint32_t chunk, uint32_t round, bool is_good) {
    if (is_good) reduce_chunk<T, Case>(p, now, chunk, round);
    return is_good;
  };
  exchange_rounds<Case>(p, state, true, take);
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm<Case>)
    zero_copy_reduce_kernel(const __grid_constant__ DirectParams p,
                            const __grid_constant__ DirectWindow window) {
  run_block(
      p, window,
      [&](const Meeting& meeting) {
        read_from_peers<T, Case, false>(p, meeting, window.place, p.send_bytes[0], p.send[p.rank],
                                        p.recv[0]);
      },
      [&](const BlockState& state) { reduce_rounds<T, Case>(p, state); });
}

// In place: each element is read, and then written, by one thread of its owner alone.
template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm<Case>)
    zero_copy_all_reduce_kernel(const __grid_constant__ DirectParams p,
                                const __grid_constant__ DirectWindow window) {
  run_block(
      p, window,
      [&](const Meeting& meeting) {
        const uint64_t all = p.send_bytes[0];
        const uint64_t each = (all / kVector + size_of<Case>(p) - 1) / size_of<Case>(p) * kVector;
        const uint64_t begin = min(p.rank * each, all);
        read_from_peers<T, Case, true>(p, meeting, begin, min(each, all - begin), p.send[0] + begin,
                                       p.recv[0] + begin);
      },
      [&](const BlockState& state) {
        if constexpr (Case::kMostRanks == 2) {
          reduce_rounds<T, Case>(p, state);
        } else {
          two_shot_rounds<T, Case>(p, state, true);
        }
      });
}

}  // namespace

cudaError_t launch_zero_copy(const DirectParams& params, const DirectWindow& window,
                             const DirectLaunch& launch) {
  return for_case(params, is_whole(params, kVector), [&](auto which) {
    return launch_direct(zero_copy_kernel<decltype(which)>, launch, params, window);
  });
}

cudaError_t launch_zero_copy_reduce(DirectType type, const DirectParams& params,
                                    const DirectWindow& window, const DirectLaunch& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_direct(zero_copy_reduce_kernel<decltype(zero), decltype(which)>, launch, params,
                         window);
  });
}

cudaError_t launch_zero_copy_all_reduce(DirectType type, const DirectParams& params,
                                        const DirectWindow& window, const DirectLaunch& launch) {
  return for_reduction(type, params, kVector, [&](auto zero, auto which) {
    return launch_direct(zero_copy_all_reduce_kernel<decltype(zero), decltype(which)>, launch,
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
