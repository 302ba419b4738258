// The residual and the RMSNorm behind an all_reduce whose kernel does not have them.
#include "torch_overlap/comm/backends/nccl/direct_norm_device.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kVector = G::kVectorBytes;

// A row a block, kEach vectors a thread. Sums are in the same order whatever the alignment.
template <typename T, typename Case, int kEach>
__global__ void __launch_bounds__(G::kThreads)
    norm_kernel(char* rows, const __grid_constant__ NormParams n) {
  __shared__ float sums[kWarps];
  char* const row = rows + blockIdx.x * n.row_bytes;
  const char* const residual = n.residual + blockIdx.x * n.row_bytes;
  RowPart<T, 4> part[kEach];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint64_t at = (threadIdx.x + uint64_t{G::kThreads} * j) * kVector;
    if (at >= n.row_bytes) continue;
    part[j].add(load_words<Case, 4>(row + at, n.row_bytes - at));
    part[j].add(load_words<Case, 4>(residual + at, n.row_bytes - at));
    if (n.bias != nullptr) part[j].add(load_words<Case, 4>(n.bias + at, n.row_bytes - at));
    part[j].round();
    squares += part[j].squares();
  }
  squares = sum_of_warp(squares);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (const float of_warp : sums) squares += of_warp;
  const float scale = scale_of(squares, n.row_bytes / sizeof(T), n.eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint64_t at = (threadIdx.x + uint64_t{G::kThreads} * j) * kVector;
    if (at >= n.row_bytes) continue;
    const auto weight = load_words<Case, 4>(n.weight + at, n.row_bytes - at);
    store_words<Case>(n.residual_out + blockIdx.x * n.row_bytes + at, part[j].rounded(),
                      n.row_bytes - at);
    store_words<Case>(row + at, part[j].normed(scale, weight), n.row_bytes - at);
  }
}

constexpr int kMostEach = 8;

// Calls `act` with how many vectors a thread has, as a type.
template <typename Act>
cudaError_t for_each(uint64_t row_bytes, const Act& act) {
  constexpr uint64_t kOfOne = G::kThreads * kVector;
  if (row_bytes <= kOfOne) return act(std::integral_constant<int, 1>{});
  if (row_bytes <= 2 * kOfOne) return act(std::integral_constant<int, 2>{});
  if (row_bytes <= 4 * kOfOne) return act(std::integral_constant<int, 4>{});
  return act(std::integral_constant<int, kMostEach>{});
}

// Calls `act(T{}, Case{}, kEach)`, the last two as types.
template <typename Act>
cudaError_t for_norm_alone(DirectType type, bool is_whole, uint64_t row_bytes, const Act& act) {
  return for_norm_type(type, [&](auto zero) {
    return for_each(row_bytes, [&](auto each) {
      return is_whole ? act(zero, UsualCase<2>{}, each) : act(zero, AnyCase{}, each);
    });
  });
}

}  // namespace

bool is_norm_possible(DirectType type, uint64_t row_bytes) {
  const bool has_type = for_norm_type(type, [](auto) { return cudaSuccess; }) == cudaSuccess;
  return has_type && row_bytes <= uint64_t{kMostEach} * G::kThreads * kVector;
}

cudaError_t launch_norm(DirectType type, char* rows, uint32_t count, const NormParams& norm,
                        cudaStream_t stream) {
  const bool is_whole =
      reinterpret_cast<uintptr_t>(rows) % kVector == 0 && is_whole_norm(norm, kVector);
  return for_norm_alone(type, is_whole, norm.row_bytes, [&](auto zero, auto which, auto each) {
    const DirectLaunch launch{
        .blocks = count, .threads = G::kThreads, .dependent = false, .stream = stream};
    return launch_direct(norm_kernel<decltype(zero), decltype(which), decltype(each)::value>,
                         launch, rows, norm);
  });
}

cudaError_t load_norm_alone() {
  for (const DirectType type : {DirectType::f16, DirectType::bf16, DirectType::f32}) {
    for (const bool is_whole : {true, false}) {
      for (const uint64_t count : {1, 2, 4, kMostEach}) {
        const cudaError_t status = for_norm_alone(
            type, is_whole, count * G::kThreads * kVector, [](auto zero, auto which, auto each) {
              return load_kernel(
                  norm_kernel<decltype(zero), decltype(which), decltype(each)::value>);
            });
        if (status != cudaSuccess) return status;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
