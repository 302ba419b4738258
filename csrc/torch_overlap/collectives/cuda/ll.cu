// LL collectives.
#include "torch_overlap/collectives/cuda/ll_device.h"

namespace torch_overlap::cuda {
namespace {

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    ll_reduce_kernel(const __grid_constant__ CollectiveParams p) {
  constexpr int kWords = kLLWords<T>;
  constexpr int kData = kWords * 4;
  const LLState state = begin_ll<Case>(p);
  const uint64_t bytes = p.send_bytes[0];
  const auto packet = static_cast<uint32_t>(threadIdx.x);
  const auto place = [&](uint32_t chunk) {
    return packet < p.chunk ? (static_cast<uint64_t>(chunk) * p.chunk + packet) * kData : bytes;
  };
  const auto load_own = [&](uint32_t chunk) {
    const uint64_t at = place(chunk);
    return at < bytes ? load_words<Case, kWords>(p.send[p.rank] + at, bytes - at) : Words<kWords>{};
  };
  Words<kWords> own = load_own(blockIdx.x);

  const auto send = [&](uint32_t chunk, uint32_t round) {
    const uint64_t at = place(chunk);
    if (at >= bytes) return;
    if (round > 0) own = load_own(chunk);
#pragma unroll
    for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
      if (peer >= size_of<Case>(p) || peer == p.rank) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      const auto data =
          p.has_single_source ? own : load_words<Case, kWords>(p.send[peer] + at, bytes - at);
      store_ll(ll_packets_of<Case>(p, peer, p.rank, epoch) + packet * G::kLLPacketBytes,
               ll_packet_of(data, epoch));
    }
  };
  const auto take = [&](uint32_t chunk, uint32_t round) {
    const uint64_t at = place(chunk);
    if (at >= bytes) return false;
    LLPacketView seen[Case::kMaxRanks];
    if (receive_ll<Case>(p, state, round, [](int) { return true; }, seen)) return true;
    auto sum = sum_of_ll_packets<T, Case, kWords>(p, own, seen);
    store_words<Case>(p.recv[0] + at, sum.result(p.op, size_of<Case>(p)), bytes - at);
    return false;
  };
  exchange_ll<Case>(p, state, send, take);
}

// A pair of ranks of which only one has data, or has more, still exchanges a packet in every round.
// The packet shows that the slot has been read.
template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    ll_copy_kernel(const __grid_constant__ CollectiveParams p) {
  constexpr int kWords = 3;
  constexpr int kData = kWords * 4;
  const LLState state = begin_ll<Case>(p);
  const auto packet = static_cast<uint32_t>(threadIdx.x);
  const auto place = [&](uint32_t chunk) {
    return (static_cast<uint64_t>(chunk) * p.chunk + packet) * kData;
  };
  const auto load_for = [&](int peer, uint64_t at) {
    return load_words<Case, kWords>(p.send[peer] + at, p.send_bytes[peer] - at);
  };
  const uint64_t begin = place(blockIdx.x);
  Words<kWords> first{};  // for all peers
  if (p.has_single_source && packet < p.chunk && begin < p.send_bytes[p.rank]) {
    first = load_for(p.rank, begin);
  }

  const auto send = [&](uint32_t chunk, uint32_t round) {
    if (packet >= p.chunk) return;
    const uint64_t at = place(chunk);
#pragma unroll
    for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
      if (peer >= size_of<Case>(p) || peer == p.rank || chunk >= p.chunks[peer]) continue;
      const bool is_empty = at >= p.send_bytes[peer];
      if (is_empty && packet != 0) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      Words<kWords> data = first;
      if (!is_empty && !(p.has_single_source && round == 0)) data = load_for(peer, at);
      store_ll(ll_packets_of<Case>(p, peer, p.rank, epoch) + packet * G::kLLPacketBytes,
               ll_packet_of(data, epoch));
    }
  };
  const auto take = [&](uint32_t chunk, uint32_t round) {
    if (packet >= p.chunk) return false;
    const uint64_t at = place(chunk);
    if (p.recv[p.rank] != p.send[p.rank] && at < p.recv_bytes[p.rank]) {
      const uint64_t left = p.recv_bytes[p.rank] - at;
      store_words<Case>(p.recv[p.rank] + at, load_words<Case, kWords>(p.send[p.rank] + at, left),
                        left);
    }
    const auto is_empty = [&](int source) { return at >= p.recv_bytes[source]; };
    const auto is_due = [&](int source) {
      return chunk < p.chunks[source] && (!is_empty(source) || packet == 0);
    };
    LLPacketView seen[Case::kMaxRanks];
    if (receive_ll<Case>(p, state, round, is_due, seen)) return true;
#pragma unroll
    for (int source = 0; source < Case::kMaxRanks; ++source) {
      if (source >= size_of<Case>(p) || source == p.rank) continue;
      if (!is_due(source) || is_empty(source)) continue;
      store_words<Case>(p.recv[source] + at, seen[source].data, p.recv_bytes[source] - at);
    }
    return false;
  };
  exchange_ll<Case>(p, state, send, take);
}

constexpr size_t kWordBytes = 4;

}  // namespace

cudaError_t launch_ll_copy(const CollectiveParams& params, const LaunchConfig& launch) {
  return for_case(params, is_unit_aligned(params, kWordBytes), [&](auto which) {
    return launch_kernel(ll_copy_kernel<decltype(which)>, launch, params);
  });
}

cudaError_t launch_ll_reduce(ReductionType type, const CollectiveParams& params,
                             const LaunchConfig& launch) {
  return for_reduction(type, params, kWordBytes, [&](auto zero, auto which) {
    return launch_kernel(ll_reduce_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t has_hopper_code(bool* has) {
  cudaFuncAttributes attributes{};
  const auto kernel = reinterpret_cast<const void*>(ll_copy_kernel<GenericCase>);
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  // __CUDA_ARCH__ / 10; binaryVersion is that of the machine code.
  *has = attributes.ptxVersion >= 90;
  return status;
}

cudaError_t load_ll_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(ll_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    return load_kernel(ll_reduce_kernel<decltype(zero), decltype(which)>);
  });
}

}  // namespace torch_overlap::cuda
