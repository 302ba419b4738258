// all_reduce with a residual, an RMSNorm and the quantization of its result in the same kernel. A
// cluster of blocks processes a row: the blocks exchange their sums of squares and their largest
// elements while the row stays in registers.
#include "torch_overlap/collectives/cuda/ll128_device.h"
#include "torch_overlap/collectives/cuda/rms_norm_device.h"
#include "torch_overlap/collectives/cuda/simple_device.h"

namespace torch_overlap::cuda {
namespace {

template <typename T, typename Case, bool kQuantizes>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    ll_norm_kernel(const __grid_constant__ CollectiveParams p,
                   const __grid_constant__ NormParams n) {
  constexpr int kWords = kLLWords<T>;
  constexpr int kData = kWords * 4;
  __shared__ RowSums sums;
  __shared__ RowMaxima maxima;
  begin_rows(sums, n.row_blocks);
  LLState state = begin_ll<Case>(p);
  const auto packet = static_cast<uint32_t>(threadIdx.x);
  const uint64_t column = (uint64_t{blockIdx.x % n.row_blocks} * p.chunk + packet) * kData;
  const bool has_packet = packet < p.chunk && column < n.row_bytes;
  const uint64_t valid = has_packet ? n.row_bytes - column : 0;
  const auto range = [&](int) {  // this thread's elements of the row
    return has_packet ? range_at<T>(n, column, kData) : RowRange{};
  };
  const auto range_of_warp = [&](int) {  // chunks with scales have whole warps
    return range_at<T>(n, column - packet % kWarp * kData, kWarp * kData);
  };
  const auto place = [&](uint32_t chunk) {
    return uint64_t{chunk / n.row_blocks} * n.row_bytes + column;
  };
  const auto load_own = [&](uint32_t chunk) {
    return load_words<Case, kWords>(p.send[p.rank] + place(chunk), valid);
  };
  Words<kWords> own{};
  if (has_packet) own = load_own(blockIdx.x);
  const uint64_t first_of_block = column - packet * kData;
  Quantizer<T, kQuantizes> quantizer(maxima, n, static_cast<uint32_t>(first_of_block / sizeof(T)));
  bool is_good = try_enter_rows(p, sums, state.entry);

  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.max_chunks; chunk += gridDim.x, ++round) {
    const uint64_t at = place(chunk);
    RowPart<T, kWords> part[1];
    Words<kWords> weight{};
    if (is_good && has_packet) {
      if (round > 0) own = load_own(chunk);
#pragma unroll
      for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank) continue;
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        store_ll(ll_packets_of<Case>(p, peer, p.rank, epoch) + packet * G::kLLPacketBytes,
                 ll_packet_of(own, epoch));
      }
      const auto residual = load_words<Case, kWords>(n.residual + at, valid);
      Words<kWords> bias{};
      if (n.bias != nullptr) bias = load_words<Case, kWords>(n.bias + column, valid);
      weight = load_words<Case, kWords>(n.weight + column, valid);
      LLPacketView seen[Case::kMaxRanks];
      is_good = !receive_ll<Case>(p, state, round, [](int) { return true; }, seen);
      part[0].start(sum_of_ll_packets<T, Case, kWords>(p, own, seen));
      part[0].add(residual);
      part[0].add(bias);
      part[0].round();
      store_words<Case>(n.residual_out + at, part[0].rounded(), valid);
    }
    RowTotals totals{part[0].squares()};
    part[0].multiply(weight);
    if constexpr (kQuantizes) totals.largest = part[0].largest();
    is_good = sum_of_row(sums, n.row_blocks, round, is_good, totals,
                         [&] { quantizer.collect(round, part, range); });
    if (!is_good) break;
    const float factor = factor_of(n, totals.squares);
    part[0].scale(factor);
    if (has_packet && n.keeps_rows) store_words<Case>(p.recv[0] + at, part[0].rounded(), valid);
    quantizer.store(chunk / n.row_blocks, round, totals.largest, factor, part, range,
                    range_of_warp);
  }
  leave_rows<Case>(p, sums, state);
}

// A warp holds a unit of a row. It sends one round ahead of the round that it receives, like
// exchange_units().
template <typename T, typename Case, bool kQuantizes>
__global__ void __launch_bounds__(G::kThreads, ll128::kLL128BlocksPerSm<Case>)
    ll128_norm_kernel(const __grid_constant__ CollectiveParams p,
                      const __grid_constant__ NormParams n) {
  __shared__ RowSums sums;
  __shared__ RowMaxima maxima;
  begin_rows(sums, n.row_blocks);
  LLState state = begin_ll<Case>(p);
  const ll128::Lane lane = ll128::this_lane();
  const uint64_t first_of_block = uint64_t{blockIdx.x % n.row_blocks} * p.chunk * G::kLL128UnitData;
  const uint64_t first = first_of_block + ll128::warp_of_block() * G::kLL128UnitData;
  const uint64_t left = first < n.row_bytes ? n.row_bytes - first : 0;
  const ll128::UnitPart of_row{first,
                               static_cast<uint32_t>(min(left, uint64_t{G::kLL128UnitData}))};
  const bool is_due = ll128::is_ll_due(of_row, lane);
  const auto range = [&](int) {  // this thread's elements of the row
    return range_at<T>(n, first + lane.at, lane.is_short ? kVector / 2 : kVector);
  };
  const auto range_of_warp = [&](int) { return range_at<T>(n, first, G::kLL128UnitData); };
  const auto unit_of = [&](uint32_t chunk) {
    return ll128::UnitPart{uint64_t{chunk / n.row_blocks} * n.row_bytes + first, of_row.bytes};
  };
  const auto load_own = [&](uint32_t chunk) {
    return ll128::load_piece<Case>(p.send[p.rank], unit_of(chunk), lane);
  };
  // The piece of the next round to send. In the last round it is still that round's piece.
  Words<4> loaded = load_own(blockIdx.x);
  Quantizer<T, kQuantizes> quantizer(maxima, n, static_cast<uint32_t>(first_of_block / sizeof(T)));
  bool is_good = try_enter_rows(p, sums, state.entry);
  const auto send = [&](uint32_t chunk, uint32_t round) {
    if (!is_good || chunk >= p.max_chunks) return;
#pragma unroll
    for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
      if (peer >= size_of<Case>(p) || peer == p.rank) continue;
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      ll128::store_ll128(ll128::ll128_slot_of<Case>(p, peer, p.rank, epoch), loaded, lane, epoch,
                         is_due);
    }
    if (chunk + gridDim.x < p.max_chunks) loaded = load_own(chunk + gridDim.x);
  };

  send(blockIdx.x, 0);
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.max_chunks; chunk += gridDim.x, ++round) {
    const ll128::UnitPart unit = unit_of(chunk);
    RowPart<T, 4> part[1];
    Words<4> weight{};
    if (is_good) {
      send(chunk + gridDim.x, round + 1);
      const bool is_last = chunk + gridDim.x >= p.max_chunks;
      const auto own = is_last ? loaded : load_own(chunk);
      const auto residual = ll128::load_piece<Case>(n.residual, unit, lane);
      Words<4> bias{};
      if (n.bias != nullptr) bias = ll128::load_piece<Case>(n.bias, of_row, lane);
      weight = ll128::load_piece<Case>(n.weight, of_row, lane);
      bool failed = false;
      part[0].start(
          ll128::combine_unit<T, Case>(p, state, lane, round, is_due, [&] { return own; }, failed));
      is_good = !failed;
      if (lane.is_short) part[0].clear_from(RowPart<T, 4>::kElements / 2);
      part[0].add(residual);
      part[0].add(bias);
      part[0].round();
      ll128::store_piece<Case>(n.residual_out, unit, lane, part[0].rounded());
    }
    RowTotals totals{part[0].squares()};
    part[0].multiply(weight);
    if constexpr (kQuantizes) totals.largest = part[0].largest();
    is_good = sum_of_row(sums, n.row_blocks, round, is_good, totals,
                         [&] { quantizer.collect(round, part, range); });
    if (!is_good) break;
    const float factor = factor_of(n, totals.squares);
    part[0].scale(factor);
    if (n.keeps_rows) ll128::store_piece<Case>(p.recv[0], unit, lane, part[0].rounded());
    quantizer.store(chunk / n.row_blocks, round, totals.largest, factor, part, range,
                    range_of_warp);
  }
  leave_rows<Case>(p, sums, state);
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kMinBlocksPerSm<Case>)
    simple_norm_kernel(const __grid_constant__ CollectiveParams p,
                       const __grid_constant__ NormParams n) {
  constexpr int kVectorsPerThread = G::kVectors / G::kThreads;
  __shared__ RowSums sums;
  begin_rows(sums, n.row_blocks);
  exchange<Case>(p, [&](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    const uint64_t first = uint64_t{chunk} * p.chunk;
    const uint64_t first_of_row = uint64_t{chunk % n.row_blocks} * p.chunk;
    const auto index = [&](int j) {
      const uint32_t i = threadIdx.x + j * blockDim.x;
      return is_good && i < p.chunk ? i : ~0U;
    };
    Words<4> seen[kVectorsPerThread][Case::kMaxRanks];
    Words<4> residual[kVectorsPerThread];
    Words<4> bias[kVectorsPerThread] = {};
    Words<4> weight[kVectorsPerThread];
#pragma unroll
    for (int j = 0; j < kVectorsPerThread; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      const uint64_t at = (first + i) * kVector;
      const uint64_t column = (first_of_row + i) * kVector;
      load_vectors<Case>(p, load_words<Case, 4>(p.send[p.rank] + at, kVector), seen[j],
                         [&](int source) {
                           const uint32_t epoch = state.epoch[source] + 1 + round;
                           return simple_slot_of<Case>(p, p.rank, source, epoch) + i * kVector;
                         });
      residual[j] = load_words<Case, 4>(n.residual + at, kVector);
      if (n.bias != nullptr) bias[j] = load_words<Case, 4>(n.bias + column, kVector);
      weight[j] = load_words<Case, 4>(n.weight + column, kVector);
    }
    RowPart<T, 4> part[kVectorsPerThread];
    RowTotals totals;
#pragma unroll
    for (int j = 0; j < kVectorsPerThread; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      part[j].start(accumulate<T, Case>(p, seen[j]));
      part[j].add(residual[j]);
      part[j].add(bias[j]);
      part[j].round();
      totals.squares += part[j].squares();
      store_words<Case>(n.residual_out + (first + i) * kVector, part[j].rounded(), kVector);
      part[j].multiply(weight[j]);
    }
    is_good = sum_of_row(sums, n.row_blocks, round, is_good, totals, [] {});
    if (!is_good) return false;
    const float factor = factor_of(n, totals.squares);
#pragma unroll
    for (int j = 0; j < kVectorsPerThread; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      part[j].scale(factor);
      if (!n.keeps_rows) continue;
      store_words<Case>(p.recv[0] + (first + i) * kVector, part[j].rounded(), kVector);
    }
    return true;
  });
}

// --- Launching -----------------------------------------------------------------------------------

// Calls `act(T{}, Case{}, quantizes)`, the last as a type. Rows of a 16-bit type may be quantized;
// the most common cases have kernels of their own for that.
template <typename Act>
cudaError_t for_norm(ReductionType type, const CollectiveParams& params, const NormParams& norm,
                     size_t unit, const Act& act) {
  const bool is_fast_path = is_unit_aligned(params, unit) && is_norm_unit_aligned(norm, unit);
  return for_norm_type(type, [&](auto zero) {
    if (norm.scaling == NormScaling::none) {
      return for_case(params, is_fast_path,
                      [&](auto which) { return act(zero, which, std::false_type{}); });
    }
    if constexpr (sizeof(zero) == 2) {
      if (is_fast_path && params.size == 2) return act(zero, FastCase<2>{}, std::true_type{});
      if (is_fast_path && params.size == 4) return act(zero, FastCase<4>{}, std::true_type{});
      return act(zero, GenericCase{}, std::true_type{});
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

constexpr size_t kWordBytes = 4;

}  // namespace

cudaError_t launch_ll_norm(ReductionType type, const CollectiveParams& params,
                           const NormParams& norm, const LaunchConfig& launch) {
  return for_norm(type, params, norm, kWordBytes, [&](auto zero, auto which, auto quantizes) {
    constexpr auto kKernel =
        ll_norm_kernel<decltype(zero), decltype(which), decltype(quantizes)::value>;
    return launch_kernel(kKernel, launch, params, norm);
  });
}

cudaError_t launch_ll128_norm(ReductionType type, const CollectiveParams& params,
                              const NormParams& norm, const LaunchConfig& launch) {
  return for_norm(type, params, norm, kVector, [&](auto zero, auto which, auto quantizes) {
    constexpr auto kKernel =
        ll128_norm_kernel<decltype(zero), decltype(which), decltype(quantizes)::value>;
    return launch_kernel(kKernel, launch, params, norm);
  });
}

cudaError_t launch_simple_norm(ReductionType type, const CollectiveParams& params,
                               const NormParams& norm, const LaunchConfig& launch) {
  return for_norm(type, params, norm, kVector, [&](auto zero, auto which, auto quantizes) {
    if constexpr (decltype(quantizes)::value) {
      return cudaErrorInvalidValue;
    } else {
      constexpr auto kKernel = simple_norm_kernel<decltype(zero), decltype(which)>;
      return launch_kernel(kKernel, launch, params, norm);
    }
  });
}

namespace {

template <typename T, typename Case, bool kQuantizes>
cudaError_t load_line_norm_kernels() {
  const cudaError_t status = load_kernel(ll_norm_kernel<T, Case, kQuantizes>);
  return status == cudaSuccess ? load_kernel(ll128_norm_kernel<T, Case, kQuantizes>) : status;
}

}  // namespace

cudaError_t load_norm_kernels() {
  for (const ReductionType type : {ReductionType::f16, ReductionType::bf16, ReductionType::f32}) {
    const cudaError_t status = for_norm_type(type, [](auto zero) {
      using T = decltype(zero);
      cudaError_t loaded = load_cases([](auto which) {
        using Case = decltype(which);
        const cudaError_t lines = load_line_norm_kernels<T, Case, false>();
        return lines == cudaSuccess ? load_kernel(simple_norm_kernel<T, Case>) : lines;
      });
      if constexpr (sizeof(T) == 2) {
        if (loaded == cudaSuccess) loaded = load_line_norm_kernels<T, FastCase<2>, true>();
        if (loaded == cudaSuccess) loaded = load_line_norm_kernels<T, FastCase<4>, true>();
        if (loaded == cudaSuccess) loaded = load_line_norm_kernels<T, GenericCase, true>();
      }
      return loaded;
    });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
