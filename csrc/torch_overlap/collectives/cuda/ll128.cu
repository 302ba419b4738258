// LL128 collectives.
#include "torch_overlap/collectives/cuda/ll128_device.h"

namespace torch_overlap::cuda {
namespace {

using namespace ll128;  // NOLINT(google-build-using-namespace)

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kLL128BlocksPerSm<Case>)
    ll128_reduce_kernel(const __grid_constant__ CollectiveParams p) {
  const LLState state = begin_ll<Case>(p);
  const uint64_t bytes = p.send_bytes[0];
  const Lane lane = this_lane();
  Sender<Case> sender(p, lane);
  // The piece that was sent is also the own piece to reduce, until the next one is loaded.
  const bool has_own = p.has_single_source && p.max_chunks <= gridDim.x;

  exchange_units<Case>(p, state, sender, [&](const Round& round) __attribute__((always_inline)) {
    bool failed = false;
    const UnitPart part = part_of(p, round.chunk, bytes);
    const auto own = [&]() __attribute__((always_inline)) {
      return has_own ? sender.piece() : load_piece<Case>(p.send[p.rank], part, lane);
    };
    const auto sum =
        reduce_unit<T, Case>(p, state, lane, round.number, is_ll_due(part, lane), own, failed);
    store_piece<Case>(p.recv[0], part, lane, sum);
    return failed;
  });
}

template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kLL128BlocksPerSm<Case>)
    ll128_copy_kernel(const __grid_constant__ CollectiveParams p) {
  const LLState state = begin_ll<Case>(p);
  const Lane lane = this_lane();
  Sender<Case> sender(p, lane);

  exchange_units<Case>(p, state, sender, [&](const Round& round) __attribute__((always_inline)) {
    bool failed = false;
    const auto copy_own = [&]() __attribute__((always_inline)) {
      if (p.recv[p.rank] == p.send[p.rank]) return;
      const UnitPart part = part_of(p, round.chunk, p.recv_bytes[p.rank]);
      store_piece<Case>(p.recv[p.rank], part, lane, load_piece<Case>(p.send[p.rank], part, lane));
    };
    receive_unit<Case>(p, state, lane, round.chunk, round.number, Kind::parts, copy_own, failed);
    return failed;
  });
}

// Each rank reduces a slice of the message, and sends the sum to all.
template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kLL128BlocksPerSm<Case>)
    ll128_two_shot_kernel(const __grid_constant__ CollectiveParams p) {
  const LLState state = begin_ll<Case>(p);
  const Lane lane = this_lane();
  Sender<Case> sender(p, lane);

  const auto answer = [&](const Round& round) __attribute__((always_inline)) {
    bool failed = false;
    const UnitPart part = part_of(p, round.chunk, p.send_bytes[p.rank]);
    const bool is_due = is_ll_due(part, lane);
    const auto own = [&]() __attribute__((always_inline)) {
      return load_piece<Case>(p.send[p.rank], part, lane);
    };
    const auto sum = reduce_unit<T, Case>(p, state, lane, round.number, is_due, own, failed);
    if (failed) return true;  // the sum would be wrong
#pragma unroll
    for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
      if (peer >= size_of<Case>(p) || peer == p.rank) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round.number;
      store_ll128(ll128_slot_of<Case>(p, peer, p.rank, epoch, Kind::sums), sum, lane, epoch,
                  is_due);
    }
    store_piece<Case>(p.recv[p.rank], part, lane, sum);
    return false;
  };
  const auto take = [&](const Round& round) __attribute__((always_inline)) {
    bool failed = false;
    receive_unit<Case>(p, state, lane, round.chunk, round.number, Kind::sums, [] {}, failed);
    return failed;
  };
  exchange_answered_units<Case>(p, state, sender, answer, take);
}

}  // namespace

cudaError_t launch_ll128_copy(const CollectiveParams& params, const LaunchConfig& launch) {
  return for_case(params, is_unit_aligned(params, G::kVectorBytes), [&](auto which) {
    return launch_kernel(ll128_copy_kernel<decltype(which)>, launch, params);
  });
}

cudaError_t launch_ll128_reduce(ReductionType type, const CollectiveParams& params,
                                const LaunchConfig& launch) {
  return for_reduction(type, params, G::kVectorBytes, [&](auto zero, auto which) {
    return launch_kernel(ll128_reduce_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t launch_ll128_two_shot(ReductionType type, const CollectiveParams& params,
                                  const LaunchConfig& launch) {
  return for_reduction(type, params, G::kVectorBytes, [&](auto zero, auto which) {
    using Case = decltype(which);
    if constexpr (Case::kMaxRanks > 2) {
      return launch_kernel(ll128_two_shot_kernel<decltype(zero), Case>, launch, params);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

cudaError_t load_ll128_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(ll128_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    using T = decltype(zero);
    using Case = decltype(which);
    const cudaError_t loaded = load_kernel(ll128_reduce_kernel<T, Case>);
    if constexpr (Case::kMaxRanks > 2) {
      if (loaded == cudaSuccess) return load_kernel(ll128_two_shot_kernel<T, Case>);
    }
    return loaded;
  });
}

}  // namespace torch_overlap::cuda
