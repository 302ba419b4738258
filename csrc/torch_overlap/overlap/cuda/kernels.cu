#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/symm/cuda/wait_device.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWordsInLine = 32;  // ChannelLayout::kLine bytes

// Of a peer that has begun. It does not begin another operation before this rank has done its part
// of this one, so its word stays.
__device__ void check_rows(const ChannelWords& words, const uint32_t* word, uint32_t rows, int peer,
                           const WaitControl& control) {
  if (has_failed(control)) return;
  const uint32_t seen = load_acquire(word);
  if (seen == rows) return;
  WaitRecord what{};
  what.kind = WaitKind::rows;
  what.window = words.id;
  what.peer = peer;
  what.expected = rows;
  give_up(control, what, seen);
}

__global__ void __launch_bounds__(kWarp)
    begin_kernel(ChannelWords words, __grid_constant__ const WordOfAll told,
                 __grid_constant__ const WordOfAll gone, const uint32_t* begun, uint32_t rows,
                 WaitControl control) {
  const uint32_t epoch = *words.epoch + 1;
  const bool tells = !has_failed(control);
  // What was read and written before is behind.
  __threadfence_system();
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarp) {
    if (peer == words.rank || !tells) continue;
    *static_cast<volatile uint32_t*>(told.at[peer] + 1) = rows;
    store_release(told.at[peer], epoch);
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarp) {
    if (peer == words.rank) continue;
    await_word(words, begun + peer * kWordsInLine, epoch, WaitKind::begin, peer, control);
    check_rows(words, begun + peer * kWordsInLine + 1, rows, peer, control);
  }
  __syncwarp();
  if (!has_failed(control)) {
    if (threadIdx.x == 0) *words.epoch = epoch;
    return;
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarp) {
    if (peer != words.rank) store_release(gone.at[peer], 1);
  }
}

__global__ void __launch_bounds__(kWarp)
    tell_kernel(ChannelWords words, __grid_constant__ const WordOfAll told, WaitControl control) {
  if (has_failed(control)) return;
  const uint32_t epoch = *words.epoch;
  // What the kernels and copies before this one wrote is there before the word is.
  __threadfence_system();
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarp) {
    if (peer != words.rank) store_release(told.at[peer], epoch);
  }
}

__global__ void __launch_bounds__(kWarp)
    await_kernel(ChannelWords words, __grid_constant__ const FlagList flags, WaitControl control) {
  const uint32_t epoch = *words.epoch;
  for (int i = static_cast<int>(threadIdx.x); i < flags.count; i += kWarp) {
    await_word(words, flags.at[i], epoch, WaitKind::chunk, flags.number[i], control);
  }
}

struct PushConfig {
  static constexpr int kThreads = 512;
  static constexpr int kUnroll = 4;
};

template <typename Vector>
__global__ void __launch_bounds__(PushConfig::kThreads)
    push_kernel(ChannelWords words, Vector* to, const Vector* from, size_t count, size_t tail,
                uint32_t* flag, WaitControl control) {
  if (has_failed(control)) return;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (PushConfig::kUnroll - 1) * stride < count; i += PushConfig::kUnroll * stride) {
    Vector values[PushConfig::kUnroll];
#pragma unroll
    for (int k = 0; k < PushConfig::kUnroll; ++k) values[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < PushConfig::kUnroll; ++k) to[i + k * stride] = values[k];
  }
  for (; i < count; i += stride) to[i] = from[i];
  if (blockIdx.x == 0 && threadIdx.x < tail) {
    reinterpret_cast<uint8_t*>(to + count)[threadIdx.x] =
        reinterpret_cast<const uint8_t*>(from + count)[threadIdx.x];
  }
  // The last block to come here tells: each block's stores are before its ticket.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(words.ticket, 1U) + 1 < gridDim.x) return;
  *words.ticket = 0;
  __threadfence_system();
  store_release(flag, *words.epoch);
}

// --- Sums
// -----------------------------------------------------------------------------------------

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return static_cast<Accumulator<T>>(value);
  }
}

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename T, int n>
struct alignas(n * sizeof(T)) Pack {
  T values[n];
};

struct SumConfig {
  static constexpr int kThreads = 512;
  // Packs that a thread has under way at once: with few blocks, loads from other GPUs need many.
  static constexpr int kUnroll = 4;
  static constexpr int kMostBlocks = 65535;
};

template <typename Part, int n>
__device__ __forceinline__ Pack<Part, n> load_pack(const Part* from) {
  if constexpr (sizeof(Pack<Part, n>) == 16) {
    // Written by others: not by way of L1.
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Pack<Part, n>&>(raw);
  } else {
    return *reinterpret_cast<const Pack<Part, n>*>(from);
  }
}

// A thread takes `n` columns of `unroll` rows at a time. A block takes rows in steps of blockDim.y.
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

cudaError_t launch_with_cluster(const void* kernel, dim3 grid, dim3 block, int cluster,
                                void** arguments, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned int>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

template <typename Part, typename Out, int n>
cudaError_t launch_sum_of(const SumParams& p, int blocks, int cluster, cudaStream_t stream) {
  const int64_t packs = (p.columns + n - 1) / n;
  unsigned int x = kWarp;
  while (x < SumConfig::kThreads && x < packs) x *= 2;
  const dim3 block(x, SumConfig::kThreads / x);
  const int64_t rows = (p.rows + block.y * SumConfig::kUnroll - 1) / (block.y * SumConfig::kUnroll);
  int64_t grid = std::min<int64_t>(rows, blocks == 0 ? SumConfig::kMostBlocks : blocks);
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
  // 8-bit parts of a 4-byte sum would make stores of 64 bytes.
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

template <typename Vector>
cudaError_t launch_push_of(const ChannelWords& words, void* to, const void* from, size_t bytes,
                           uint32_t* flag, const WaitControl& control, int blocks, int cluster,
                           cudaStream_t stream) {
  ChannelWords w = words;
  WaitControl c = control;
  auto* typed_to = static_cast<Vector*>(to);
  const auto* typed_from = static_cast<const Vector*>(from);
  size_t count = bytes / sizeof(Vector);
  size_t tail = bytes % sizeof(Vector);
  void* arguments[] = {&w, &typed_to, &typed_from, &count, &tail, &flag, &c};
  return launch_with_cluster(reinterpret_cast<const void*>(push_kernel<Vector>),
                             dim3(static_cast<unsigned int>(blocks)), dim3(PushConfig::kThreads),
                             cluster, arguments, stream);
}

}  // namespace

cudaError_t launch_begin(const ChannelWords& words, const WordOfAll& told, const WordOfAll& gone,
                         const uint32_t* begun, uint32_t rows, const WaitControl& control,
                         cudaStream_t stream) {
  begin_kernel<<<1, kWarp, 0, stream>>>(words, told, gone, begun, rows, control);
  return cudaGetLastError();
}

cudaError_t launch_tell(const ChannelWords& words, const WordOfAll& told,
                        const WaitControl& control, cudaStream_t stream) {
  tell_kernel<<<1, kWarp, 0, stream>>>(words, told, control);
  return cudaGetLastError();
}

cudaError_t launch_await(const ChannelWords& words, const FlagList& flags,
                         const WaitControl& control, cudaStream_t stream) {
  await_kernel<<<1, kWarp, 0, stream>>>(words, flags, control);
  return cudaGetLastError();
}

cudaError_t launch_push(const ChannelWords& words, void* to, const void* from, size_t bytes,
                        uint32_t* flag, const WaitControl& control, int blocks, int cluster,
                        cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (bits % sizeof(uint4) == 0) {
    return launch_push_of<uint4>(words, to, from, bytes, flag, control, blocks, cluster, stream);
  }
  if (bits % sizeof(uint32_t) == 0) {
    return launch_push_of<uint32_t>(words, to, from, bytes, flag, control, blocks, cluster, stream);
  }
  return launch_push_of<uint8_t>(words, to, from, bytes, flag, control, blocks, cluster, stream);
}

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

cudaError_t load_overlap_kernels() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(begin_kernel),
      reinterpret_cast<const void*>(tell_kernel),
      reinterpret_cast<const void*>(await_kernel),
      reinterpret_cast<const void*>(push_kernel<uint4>),
      reinterpret_cast<const void*>(push_kernel<uint32_t>),
      reinterpret_cast<const void*>(push_kernel<uint8_t>),
      reinterpret_cast<const void*>(sum_kernel<double, double, 2>),
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
      reinterpret_cast<const void*>(sum_kernel<__nv_fp8_e5m2, __nv_bfloat16, 1>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
