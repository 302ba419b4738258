// Exchanges by lines of 128 bytes.
#include "torch_overlap/comm/backends/nccl/direct_ll128_device.h"

namespace torch_overlap::cuda {
namespace {

using namespace ll128;  // NOLINT(google-build-using-namespace)

// Calls act(unit) for the units of a chunk that are this warp's.
template <typename Act>
__device__ __forceinline__ void for_units(const DirectParams& p, const Act& act) {
#pragma unroll 1
  for (uint32_t unit = warp_of_block(); unit < p.chunk; unit += kMostWarps) act(unit);
}

// What a warp sends, unit by unit. The first piece of what goes to the next rank, often of all that
// goes out, is loaded while the block still asks whether it may send.
template <typename Case>
class Sender {
 public:
  __device__ __forceinline__ Sender(const DirectParams& p, const Lane& lane)
      : p_(p), lane_(lane), next_(rank_after<Case>(p, 1)) {
    piece_ = load(next_, part(blockIdx.x, warp_of_block(), next_));
  }

  // Of a unit that follows the one before.
  __device__ __forceinline__ void begin_unit(uint32_t chunk, uint32_t unit) {
    if (!is_first_) piece_ = load(next_, part(chunk, unit, next_));
    is_first_ = false;
  }
  // To a peer, in the round that makes the epoch `epoch`. is_due(part): see store_wide().
  template <typename IsDue>
  __device__ __forceinline__ void send(int peer, uint32_t chunk, uint32_t unit, uint32_t epoch,
                                       const IsDue& is_due) const {
    const UnitPart of_peer = part(chunk, unit, peer);
    const bool is_loaded = Case::kMostRanks == 2 || p_.one_source || peer == next_;
    const auto words = is_loaded ? piece_ : load(peer, of_peer);
    store_wide(unit_of<Case>(p_, peer, p_.rank, epoch, unit), words, lane_, epoch, is_due(of_peer));
  }
  // What has gone to the next rank.
  __device__ __forceinline__ const Words<4>& piece() const { return piece_; }

 private:
  __device__ __forceinline__ UnitPart part(uint32_t chunk, uint32_t unit, int peer) const {
    return part_of(p_, chunk, unit, p_.send_bytes[peer]);
  }
  __device__ __forceinline__ Words<4> load(int peer, const UnitPart& part) const {
    return load_piece<Case>(p_.send[peer], part, lane_);
  }

  const DirectParams& p_;
  const Lane& lane_;
  const int next_;
  Words<4> piece_;
  bool is_first_ = true;
};

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kWideBlocksOfSm<Case>)
    ll128_reduce_kernel(const __grid_constant__ DirectParams p) {
  const LineState state = begin_lines<Case>(p);
  const uint64_t bytes = p.send_bytes[0];
  const Lane lane = this_lane();
  Sender<Case> sender(p, lane);
  // What was sent is what is added, too; a warp that has sent more since loads it again.
  const bool has_own = p.one_source && p.chunk <= kMostWarps;

  const auto send = [&](uint32_t chunk, uint32_t round) {
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      sender.begin_unit(chunk, unit);
#pragma unroll
      for (int peer = 0; peer < Case::kMostRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank) continue;
        sender.send(peer, chunk, unit, state.epoch[peer] + 1 + round,
                    [&](const UnitPart& part) { return part.has_line(lane); });
      }
    });
  };
  const auto take = [&](uint32_t chunk, uint32_t round) {
    bool failed = false;
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      const UnitPart part = part_of(p, chunk, unit, bytes);
      const auto unit_from = [&](int source, uint32_t epoch) __attribute__((always_inline)) {
        return unit_of<Case>(p, p.rank, source, epoch, unit);
      };
      uint4 seen[Case::kMostRanks];
#pragma unroll
      for (int source = 0; source < Case::kMostRanks; ++source) {
        if (source >= size_of<Case>(p) || source == p.rank) continue;
        const uint32_t epoch = state.epoch[source] + 1 + round;
        seen[source] = load_wide(unit_from(source, epoch), part.has_line(lane));
      }
      const auto own = has_own ? sender.piece() : load_piece<Case>(p.send[p.rank], part, lane);
      Accumulator<Case, T, 4> sum;
#pragma unroll
      for (int source = 0; source < Case::kMostRanks; ++source) {
        if (source >= size_of<Case>(p)) continue;
        Words<4> words = own;
        if (source != p.rank) {
          const uint32_t epoch = state.epoch[source] + 1 + round;
          failed = await_wide(p, seen[source], unit_from(source, epoch), source, lane, epoch,
                              part.has_line(lane)) ||
                   failed;
          words = words_of(seen[source]);
        }
        if (source == 0) {
          sum.start(words);
        } else {
          sum.add(p.op, words);
        }
      }
      store_piece<Case>(p.recv[0], part, lane, sum.result(p.op, size_of<Case>(p)));
    });
    return failed;
  };
  exchange_lines<Case>(p, state, send, take);
}

// As with lines of 16 bytes, a pair of ranks of which one has less to say still exchanges a line in
// every round.
template <typename Case>
__global__ void __launch_bounds__(G::kThreads, kWideBlocksOfSm<Case>)
    ll128_copy_kernel(const __grid_constant__ DirectParams p) {
  const LineState state = begin_lines<Case>(p);
  const Lane lane = this_lane();
  const auto is_due = [&](const UnitPart& part, uint32_t unit) {
    return part.has_line(lane) || (unit == 0 && lane.line_at == 0);
  };
  Sender<Case> sender(p, lane);

  const auto send = [&](uint32_t chunk, uint32_t round) {
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      sender.begin_unit(chunk, unit);
#pragma unroll
      for (int peer = 0; peer < Case::kMostRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank || chunk >= p.chunks[peer]) continue;
        sender.send(peer, chunk, unit, state.epoch[peer] + 1 + round,
                    [&](const UnitPart& part) { return is_due(part, unit); });
      }
    });
  };
  const auto take = [&](uint32_t chunk, uint32_t round) {
    bool failed = false;
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      // act(source, epoch, part, its unit, its line) of every source.
      uint4 seen[Case::kMostRanks];
      const auto for_sources = [&](const auto& act) __attribute__((always_inline)) {
#pragma unroll
        for (int source = 0; source < Case::kMostRanks; ++source) {
          if (source >= size_of<Case>(p) || source == p.rank || chunk >= p.chunks[source]) continue;
          const uint32_t epoch = state.epoch[source] + 1 + round;
          act(source, epoch, part_of(p, chunk, unit, p.recv_bytes[source]),
              unit_of<Case>(p, p.rank, source, epoch, unit), seen[source]);
        }
      };
      for_sources(
          [&](int, uint32_t, const UnitPart& part, const char* from, uint4& line)
              __attribute__((always_inline)) { line = load_wide(from, is_due(part, unit)); });
      if (p.recv[p.rank] != p.send[p.rank]) {
        const UnitPart part = part_of(p, chunk, unit, p.recv_bytes[p.rank]);
        store_piece<Case>(p.recv[p.rank], part, lane, load_piece<Case>(p.send[p.rank], part, lane));
      }
      for_sources([&](int source, uint32_t epoch, const UnitPart& part, const char* from,
                      uint4& line) __attribute__((always_inline)) {
        failed = await_wide(p, line, from, source, lane, epoch, is_due(part, unit)) || failed;
        store_piece<Case>(p.recv[source], part, lane, words_of(line));
      });
    });
    return failed;
  };
  exchange_lines<Case>(p, state, send, take);
}

}  // namespace

cudaError_t launch_ll128_copy(const DirectParams& params, const DirectLaunch& launch) {
  return for_case(params, is_whole(params, G::kVectorBytes), [&](auto which) {
    return launch_direct(ll128_copy_kernel<decltype(which)>, launch, params);
  });
}

cudaError_t launch_ll128_reduce(DirectType type, const DirectParams& params,
                                const DirectLaunch& launch) {
  return for_reduction(type, params, G::kVectorBytes, [&](auto zero, auto which) {
    return launch_direct(ll128_reduce_kernel<decltype(zero), decltype(which)>, launch, params);
  });
}

cudaError_t load_ll128_kernels() {
  const cudaError_t status =
      load_cases([](auto which) { return load_kernel(ll128_copy_kernel<decltype(which)>); });
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    return load_kernel(ll128_reduce_kernel<decltype(zero), decltype(which)>);
  });
}

}  // namespace torch_overlap::cuda
