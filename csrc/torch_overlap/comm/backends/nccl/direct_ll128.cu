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

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kWideBlocksOfSm<Case>)
    ll128_reduce_kernel(const __grid_constant__ DirectParams p) {
  const LineState state = begin_lines<Case>(p);
  const uint64_t bytes = p.send_bytes[0];
  const Lane lane = this_lane();
  const auto load_own = [&](const UnitPart& part) {
    return load_piece<Case>(p.send[p.rank], part, lane);
  };
  // Of the unit that was sent last. A warp that has more of a chunk loads them again to add them.
  const bool has_more = p.chunk > kMostWarps;
  Words<4> own = load_own(part_of(p, blockIdx.x, warp_of_block(), bytes));
  bool is_first = true;

  const auto send = [&](uint32_t chunk, uint32_t round) {
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      const UnitPart part = part_of(p, chunk, unit, bytes);
      if (!is_first) own = load_own(part);
      is_first = false;
#pragma unroll
      for (int peer = 0; peer < Case::kMostRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank) continue;
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        const auto data = p.one_source ? own : load_piece<Case>(p.send[peer], part, lane);
        store_wide(unit_of<Case>(p, peer, p.rank, epoch, unit), data, lane, epoch,
                   part.has_line(lane));
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
      if (has_more) own = load_own(part);
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
  const auto load_own = [&](uint32_t chunk, uint32_t unit) {
    return load_piece<Case>(p.send[p.rank], part_of(p, chunk, unit, p.send_bytes[p.rank]), lane);
  };
  Words<4> own{};  // for all
  if (p.one_source) own = load_own(blockIdx.x, warp_of_block());
  bool is_first = true;

  const auto send = [&](uint32_t chunk, uint32_t round) {
    for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
      if (p.one_source && !is_first) own = load_own(chunk, unit);
      is_first = false;
#pragma unroll
      for (int peer = 0; peer < Case::kMostRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank || chunk >= p.chunks[peer]) continue;
        const UnitPart part = part_of(p, chunk, unit, p.send_bytes[peer]);
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        const auto data = p.one_source ? own : load_piece<Case>(p.send[peer], part, lane);
        store_wide(unit_of<Case>(p, peer, p.rank, epoch, unit), data, lane, epoch,
                   is_due(part, unit));
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
