// The residual, the RMSNorm and its quantization after an all_reduce whose kernel does not include
// them.
#include "torch_overlap/collectives/cuda/rms_norm_device.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kVector = G::kVectorBytes;

// Processes one row per block, kVectorsPerThread vectors per thread. The order of summation does
// not depend on the alignment.
template <typename T, typename Case, int kVectorsPerThread, bool kQuantizes>
__global__ void __launch_bounds__(G::kThreads)
    norm_kernel(char* rows, const __grid_constant__ NormParams n) {
  __shared__ RowTotals of_warp[kWarps];
  __shared__ RowMaxima maxima;
  Quantizer<T, kQuantizes> quantizer(maxima, n, 0);
  if constexpr (kQuantizes) __syncthreads();
  char* const row = rows + blockIdx.x * n.row_bytes;
  const char* const residual = n.residual + blockIdx.x * n.row_bytes;
  const auto column = [](int j) { return (threadIdx.x + uint64_t{G::kThreads} * j) * kVector; };
  const auto range = [&](int j) { return range_at<T>(n, column(j), kVector); };
  const auto range_of_warp = [&](int j) {
    return range_at<T>(n, column(j) - threadIdx.x % kWarp * kVector, kWarp * kVector);
  };
  RowPart<T, 4> part[kVectorsPerThread];
  Words<4> weight[kVectorsPerThread];
#pragma unroll
  for (int j = 0; j < kVectorsPerThread; ++j) {
    const uint64_t at = column(j);
    if (at >= n.row_bytes) continue;
    part[j].add(load_words<Case, 4>(row + at, n.row_bytes - at));
    part[j].add(load_words<Case, 4>(residual + at, n.row_bytes - at));
    if (n.bias != nullptr) part[j].add(load_words<Case, 4>(n.bias + at, n.row_bytes - at));
    weight[j] = load_words<Case, 4>(n.weight + at, n.row_bytes - at);
  }
  RowTotals totals;
#pragma unroll
  for (int j = 0; j < kVectorsPerThread; ++j) {
    const uint64_t at = column(j);
    if (at >= n.row_bytes) continue;
    part[j].round();
    totals.squares += part[j].squares();
    store_words<Case>(n.residual_out + blockIdx.x * n.row_bytes + at, part[j].rounded(),
                      n.row_bytes - at);
    part[j].multiply(weight[j]);
    if constexpr (kQuantizes) totals.largest = max(totals.largest, part[j].largest());
  }
  totals = totals_of_block(of_warp, totals, [&] { quantizer.collect(0, part, range); });
  const float factor = factor_of(n, totals.squares);
#pragma unroll
  for (int j = 0; j < kVectorsPerThread; ++j) {
    const uint64_t at = column(j);
    if (at >= n.row_bytes) continue;
    part[j].scale(factor);
    if (n.keeps_rows) store_words<Case>(row + at, part[j].rounded(), n.row_bytes - at);
  }
  quantizer.store(blockIdx.x, 0, totals.largest, factor, part, range, range_of_warp);
}

// Calls `act` with true as a type if the rows are quantized, which must be of a 16-bit type T.
template <typename T, typename Act>
cudaError_t for_quantization(const NormParams& norm, const Act& act) {
  if (norm.scaling == NormScaling::none) return act(std::false_type{});
  if constexpr (sizeof(T) == 2) {
    return act(std::true_type{});
  } else {
    return cudaErrorInvalidValue;
  }
}

// Calls `act` with the number of vectors per thread, as a type.
template <typename Act>
cudaError_t for_each(uint64_t row_bytes, const Act& act) {
  constexpr uint64_t kBlockBytes = G::kThreads * kVector;
  if (row_bytes <= kBlockBytes) return act(std::integral_constant<int, 1>{});
  if (row_bytes <= 2 * kBlockBytes) return act(std::integral_constant<int, 2>{});
  if (row_bytes <= 4 * kBlockBytes) return act(std::integral_constant<int, 4>{});
  return act(std::integral_constant<int, kMaxVectorsPerThread>{});
}

// Calls `act(T{}, Case{}, kVectorsPerThread, quantizes)`, all but the first as types.
template <typename Act>
cudaError_t for_rms_norm(ReductionType type, bool is_unit_aligned, const NormParams& norm,
                         const Act& act) {
  return for_norm_type(type, [&](auto zero) {
    return for_each(norm.row_bytes, [&](auto each) {
      return for_quantization<decltype(zero)>(norm, [&](auto quantizes) {
        return is_unit_aligned ? act(zero, FastCase<2>{}, each, quantizes)
                               : act(zero, GenericCase{}, each, quantizes);
      });
    });
  });
}

}  // namespace

bool supports_rms_norm(ReductionType type, uint64_t row_bytes) {
  const bool has_type = for_norm_type(type, [](auto) { return cudaSuccess; }) == cudaSuccess;
  return has_type && row_bytes <= uint64_t{kMaxVectorsPerThread} * G::kThreads * kVector;
}

cudaError_t launch_norm(ReductionType type, char* rows, const NormParams& norm,
                        cudaStream_t stream) {
  const bool is_unit_aligned =
      reinterpret_cast<uintptr_t>(rows) % kVector == 0 && is_norm_unit_aligned(norm, kVector);
  return for_rms_norm(
      type, is_unit_aligned, norm, [&](auto zero, auto which, auto each, auto quantizes) {
        const LaunchConfig launch{.blocks = static_cast<unsigned int>(norm.rows),
                                  .threads = G::kThreads,
                                  .dependent = false,
                                  .stream = stream};
        return launch_kernel(norm_kernel<decltype(zero), decltype(which), decltype(each)::value,
                                         decltype(quantizes)::value>,
                             launch, rows, norm);
      });
}

cudaError_t load_rms_norm_rows_kernels() {
  for (const ReductionType type : {ReductionType::f16, ReductionType::bf16, ReductionType::f32}) {
    for (const bool is_unit_aligned : {true, false}) {
      for (const uint64_t count : {1, 2, 4, kMaxVectorsPerThread}) {
        for (const NormScaling scaling : {NormScaling::none, NormScaling::row}) {
          if (scaling != NormScaling::none && type == ReductionType::f32) continue;
          NormParams norm{};
          norm.row_bytes = count * G::kThreads * kVector;
          norm.scaling = scaling;
          const cudaError_t status = for_rms_norm(
              type, is_unit_aligned, norm, [](auto zero, auto which, auto each, auto quantizes) {
                return load_kernel(norm_kernel<decltype(zero), decltype(which),
                                               decltype(each)::value, decltype(quantizes)::value>);
              });
          if (status != cudaSuccess) return status;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
