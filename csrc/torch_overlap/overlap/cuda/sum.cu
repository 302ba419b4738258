#include <cuda_fp8.h>

#include <algorithm>

#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/overlap/cuda/launch.h"
#include "torch_overlap/overlap/cuda/values.cuh"

namespace torch_overlap::cuda {
namespace {

constexpr int kWarpSize = 32;

struct SumConfig {
  static constexpr int kThreads = 512;
  // Packs that a thread loads concurrently. With few blocks, loads from other GPUs need many in
  // flight.
  static constexpr int kUnroll = 4;
  static constexpr int kMaxBlocks = 65535;
};

template <typename Part, int n>
__device__ __forceinline__ Pack<Part, n> load_pack(const Part* from) {
  if constexpr (sizeof(Pack<Part, n>) == 16) {
    // Bypasses L1: other ranks write this memory.
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Pack<Part, n>&>(raw);
  } else {
    return *reinterpret_cast<const Pack<Part, n>*>(from);
  }
}

// A thread sums `n` columns of `unroll` rows per iteration. A block has blockDim.y rows of threads.
template <typename Part, typename Out, int n>
__global__ void __launch_bounds__(SumConfig::kThreads)
    sum_kernel(__grid_constant__ const SumParams p) {
  using A = Accumulator<Part>;
  constexpr int unroll = SumConfig::kUnroll;
  const A scale = static_cast<A>(p.factor) *
                  (p.scale_inv == nullptr ? static_cast<A>(1) : static_cast<A>(*p.scale_inv));
  const bool scales = p.scale_inv != nullptr || p.factor != 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; first < p.rows;
       first += step * unroll) {
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * n; column < p.columns;
         column += static_cast<int64_t>(blockDim.x) * n) {
      A total[unroll][n];
      for (int part = 0; part < p.count; ++part) {
        const auto* from = static_cast<const Part*>(p.parts[part]) + column;
        Pack<Part, n> loaded[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
          const int64_t row = first + u * step;
          if (row < p.rows) loaded[u] = load_pack<Part, n>(from + row * p.part_stride[part]);
        }
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
#pragma unroll
          for (int i = 0; i < n; ++i) {
            const A value = widen(loaded[u].values[i]);
            total[u][i] = part == 0 ? value : total[u][i] + value;
          }
        }
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int64_t row = first + u * step;
        if (row >= p.rows) continue;
        Pack<Out, n> stored;
#pragma unroll
        for (int i = 0; i < n; ++i) {
          A value = total[u][i];
          if (scales) value *= scale;
          if (p.bias != nullptr) value += widen(static_cast<const Out*>(p.bias)[column + i]);
          stored.values[i] = narrow<Out>(value);
        }
        *reinterpret_cast<Pack<Out, n>*>(static_cast<Out*>(p.out) + row * p.out_stride + column) =
            stored;
      }
    }
  }
}

template <typename Part, typename Out>
bool is_aligned(const SumParams& p, int n) {
  const auto fits = [n](const void* pointer, int64_t stride, size_t element) {
    return reinterpret_cast<uintptr_t>(pointer) % (n * element) == 0 && stride % n == 0;
  };
  bool all = p.columns % n == 0 && fits(p.out, p.out_stride, sizeof(Out));
  for (int i = 0; i < p.count; ++i) all &= fits(p.parts[i], p.part_stride[i], sizeof(Part));
  return all;
}

template <typename Part, typename Out, int n>
cudaError_t launch_sum_of(const SumParams& p, int blocks, int cluster, cudaStream_t stream) {
  const int64_t packs = (p.columns + n - 1) / n;
  unsigned int x = kWarpSize;
  while (x < SumConfig::kThreads && x < packs) x *= 2;
  const dim3 block(x, SumConfig::kThreads / x);
  const int64_t rows = (p.rows + block.y * SumConfig::kUnroll - 1) / (block.y * SumConfig::kUnroll);
  int64_t grid = std::min<int64_t>(rows, blocks == 0 ? SumConfig::kMaxBlocks : blocks);
  if (cluster > 1) grid = (grid + cluster - 1) / cluster * cluster;
  SumParams params = p;
  void* arguments[] = {&params};
  return launch_with_cluster(reinterpret_cast<const void*>(sum_kernel<Part, Out, n>),
                             dim3(static_cast<unsigned int>(grid)), block, cluster, arguments,
                             stream);
}

template <typename Part, typename Out>
cudaError_t launch_sum_typed(const SumParams& p, int blocks, int cluster, cudaStream_t stream) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(Part));
  // Limits a pack of the output to 32 bytes: one of 8-bit parts with a 4-byte sum would have 64.
  constexpr int n = sizeof(Out) * kPack > 32 ? 32 / static_cast<int>(sizeof(Out)) : kPack;
  if (is_aligned<Part, Out>(p, n)) return launch_sum_of<Part, Out, n>(p, blocks, cluster, stream);
  return launch_sum_of<Part, Out, 1>(p, blocks, cluster, stream);
}

template <typename Part>
cudaError_t launch_sum_of_bytes(const SumParams& p, int blocks, int cluster, cudaStream_t stream) {
  switch (p.out_type) {
    case SumType::f32:
      return launch_sum_typed<Part, float>(p, blocks, cluster, stream);
    case SumType::f16:
      return launch_sum_typed<Part, __half>(p, blocks, cluster, stream);
    case SumType::bf16:
      return launch_sum_typed<Part, __nv_bfloat16>(p, blocks, cluster, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_sum(const SumParams& p, int blocks, int cluster, cudaStream_t stream) {
  switch (p.part_type) {
    case SumType::f64:
      return launch_sum_typed<double, double>(p, blocks, cluster, stream);
    case SumType::f32:
      return launch_sum_typed<float, float>(p, blocks, cluster, stream);
    case SumType::f16:
      return launch_sum_typed<__half, __half>(p, blocks, cluster, stream);
    case SumType::bf16:
      return launch_sum_typed<__nv_bfloat16, __nv_bfloat16>(p, blocks, cluster, stream);
    case SumType::e4m3:
      return launch_sum_of_bytes<__nv_fp8_e4m3>(p, blocks, cluster, stream);
    case SumType::e5m2:
      return launch_sum_of_bytes<__nv_fp8_e5m2>(p, blocks, cluster, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t load_sum_kernels() {
  return load_kernels({reinterpret_cast<const void*>(sum_kernel<double, double, 2>),
                       reinterpret_cast<const void*>(sum_kernel<double, double, 1>),
                       reinterpret_cast<const void*>(sum_kernel<float, float, 4>),
                       reinterpret_cast<const void*>(sum_kernel<float, float, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__half, __half, 8>),
                       reinterpret_cast<const void*>(sum_kernel<__half, __half, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_bfloat16, __nv_bfloat16, 8>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_bfloat16, __nv_bfloat16, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, float, 8>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, float, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, __half, 16>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, __half, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, __nv_bfloat16, 16>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e4m3, __nv_bfloat16, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, float, 8>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, float, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, __half, 16>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, __half, 1>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, __nv_bfloat16, 16>),
                       reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, __nv_bfloat16, 1>)});
}

}  // namespace torch_overlap::cuda
