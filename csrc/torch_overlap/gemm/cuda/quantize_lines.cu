#include <algorithm>
#include <type_traits>

#include "torch_overlap/gemm/cuda/quantize_values.cuh"

// Kernels that read x in its own order: the largest of all, one scale for all, a scale a row.
namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Vectors that a thread has under way at once.
constexpr int kUnroll = 4;

// The largest of a block's threads, in thread 0.
template <typename T>
__device__ __forceinline__ uint32_t largest_of_block(uint32_t most) {
  __shared__ uint32_t of_warps[kThreads / kWarp];
  most = largest_of_lanes<T>(most, kWarp);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kThreads / kWarp; ++i) most = larger<T>(most, of_warps[i]);
  }
  return most;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* x, int64_t count, bool aligned, uint32_t* largest) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  uint32_t most = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
       base * kVector < count; base += step) {
    Vector<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = (base + u * kThreads) * kVector;
      v[u] = load_vector(x + at, count - at, aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) most = larger<T>(most, largest_of(v[u]));
  }
  most = largest_of_block<T>(most);
  if (threadIdx.x == 0) atomicMax(largest, magnitude<T>(most));
}

template <typename T, bool e5m2>
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const __grid_constant__ QuantizeParams p, bool aligned) {
  const int64_t count = p.rows * p.columns;
  const auto* x = static_cast<const T*>(p.x);
  const float scale = p.scale != nullptr ? *p.scale : scale_of<e5m2>(*p.largest, p.power_of_two);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *static_cast<float*>(p.scales.at) = __frcp_rn(scale);
  }
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  Vector<T> v[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = (base + u * kThreads) * kVector;
    v[u] = load_vector(x + at, count - at, aligned);
  }
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = (base + u * kThreads) * kVector;
    store_vector(p.data + at,
                 eight_bytes<e5m2>([&](int i) { return __fmul_rn(element(v[u], i), scale); }),
                 count - at, true);
    most = larger<T>(most, largest_of(v[u]));
  }
  if (p.scale == nullptr) return;
  most = largest_of_block<T>(most);
  if (threadIdx.x == 0) atomicMax(p.largest, magnitude<T>(most));
}

// `lanes` threads a row: a warp, or a block.
template <typename T, bool e5m2, int lanes>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ QuantizeParams p, bool aligned, bool stores_vectors) {
  constexpr int rows_of_block = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * rows_of_block + static_cast<int>(threadIdx.x) / lanes;
  if (lanes == kWarp && row >= p.rows) return;
  const T* x = static_cast<const T*>(p.x) + row * p.columns;
  // The first vectors stay in registers, what is behind them is read again.
  Vector<T> kept[kUnroll];
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = static_cast<int64_t>(lane + u * lanes) * kVector;
    kept[u] = load_vector(x + at, p.columns - at, aligned);
    most = larger<T>(most, largest_of(kept[u]));
  }
  constexpr int64_t rest = static_cast<int64_t>(lanes) * kUnroll * kVector;
  for (int64_t at = rest + lane * kVector; at < p.columns; at += lanes * kVector) {
    most = larger<T>(most, largest_of(load_vector(x + at, p.columns - at, aligned)));
  }
  if constexpr (lanes == kWarp) {
    most = largest_of_lanes<T>(most, kWarp);
  } else {
    __shared__ uint32_t of_all;
    most = largest_of_block<T>(most);
    if (threadIdx.x == 0) of_all = most;
    __syncthreads();
    most = of_all;
  }
  const float scale = scale_of<e5m2>(magnitude<T>(most), p.power_of_two);
  if (lane == 0) static_cast<float*>(p.scales.at)[row * p.scales.row_stride] = __frcp_rn(scale);
  uint8_t* out = p.data + row * p.columns;
  const auto store = [&](const Vector<T>& v, int64_t at) {
    store_vector(out + at,
                 eight_bytes<e5m2>([&](int i) { return __fmul_rn(element(v, i), scale); }),
                 p.columns - at, stores_vectors);
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    store(kept[u], static_cast<int64_t>(lane + u * lanes) * kVector);
  }
  for (int64_t at = rest + lane * kVector; at < p.columns; at += lanes * kVector) {
    store(load_vector(x + at, p.columns - at, aligned), at);
  }
}

unsigned int blocks_for(int64_t count) {
  constexpr int64_t of_block = static_cast<int64_t>(kThreads) * kUnroll * kVector;
  return static_cast<unsigned int>((count + of_block - 1) / of_block);
}

}  // namespace

cudaError_t launch_largest(const QuantizeParams& p, cudaStream_t stream) {
  // A block adds one atomic operation; so many fill all GPUs there are.
  constexpr unsigned int most_blocks = 2048;
  const int64_t count = p.rows * p.columns;
  return with_type(p.type, [&](auto type) {
    using T = decltype(type);
    largest_kernel<T><<<std::min(blocks_for(count), most_blocks), kThreads, 0, stream>>>(
        static_cast<const T*>(p.x), count, is_aligned(p.x, 16), p.largest);
    return cudaGetLastError();
  });
}

cudaError_t launch_quantize_flat(const QuantizeParams& p, cudaStream_t stream) {
  return with_type(p.type, [&](auto type) {
    return with_format(p.e5m2, [&](auto e5m2) {
      flat_kernel<decltype(type), e5m2>
          <<<blocks_for(p.rows * p.columns), kThreads, 0, stream>>>(p, is_aligned(p.x, 16));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_quantize_rows(const QuantizeParams& p, cudaStream_t stream) {
  const bool stores_vectors = p.columns % kVector == 0 && is_aligned(p.data, kVector);
  return with_type(p.type, [&](auto type) {
    using T = decltype(type);
    return with_format(p.e5m2, [&](auto e5m2) {
      constexpr int64_t rows_of_block = kThreads / kWarp;
      if (p.columns <= kWarp * kUnroll * kVector) {
        const auto blocks = static_cast<unsigned int>((p.rows + rows_of_block - 1) / rows_of_block);
        rows_kernel<T, e5m2, kWarp>
            <<<blocks, kThreads, 0, stream>>>(p, reads_vectors<T>(p), stores_vectors);
      } else {
        rows_kernel<T, e5m2, kThreads><<<static_cast<unsigned int>(p.rows), kThreads, 0, stream>>>(
            p, reads_vectors<T>(p), stores_vectors);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace torch_overlap::cuda
