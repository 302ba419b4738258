#include <algorithm>
#include <type_traits>

#include "torch_overlap/gemm/cuda/quantize_values.cuh"

// Kernels that read x in memory order: amax of the tensor, one scale for the tensor, one scale per
// row.
namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Number of vectors that a thread has in flight.
constexpr int kUnroll = 4;

// Returns the largest magnitude over the threads of a block, in thread 0.
template <typename T>
__device__ __forceinline__ uint32_t block_amax(uint32_t amax_bits) {
  __shared__ uint32_t warp_maxima[kThreads / kWarp];
  amax_bits = warp_amax<T>(amax_bits, kWarp);
  if (threadIdx.x % kWarp == 0) warp_maxima[threadIdx.x / kWarp] = amax_bits;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kThreads / kWarp; ++i) amax_bits = larger<T>(amax_bits, warp_maxima[i]);
  }
  return amax_bits;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* x, int64_t count, bool aligned, uint32_t* largest) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  uint32_t amax_bits = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
       base * kVector < count; base += step) {
    Vector<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = (base + u * kThreads) * kVector;
      v[u] = load_vector(x + at, count - at, aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) amax_bits = larger<T>(amax_bits, vector_amax(v[u]));
  }
  amax_bits = block_amax<T>(amax_bits);
  if (threadIdx.x == 0) atomicMax(largest, magnitude<T>(amax_bits));
}

template <typename T, bool e5m2>
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const __grid_constant__ QuantizeParams p, bool aligned) {
  const int64_t count = p.rows * p.columns;
  const auto* x = static_cast<const T*>(p.x);
  const float scale =
      p.scale != nullptr ? *p.scale : scale_from_amax<e5m2>(*p.largest, p.power_of_two);
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
  uint32_t amax_bits = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = (base + u * kThreads) * kVector;
    store_vector(p.data + at,
                 to_fp8x8<e5m2>([&](int i) { return __fmul_rn(element(v[u], i), scale); }),
                 count - at, true);
    amax_bits = larger<T>(amax_bits, vector_amax(v[u]));
  }
  if (p.scale == nullptr) return;
  amax_bits = block_amax<T>(amax_bits);
  if (threadIdx.x == 0) atomicMax(p.largest, magnitude<T>(amax_bits));
}

// `lanes` threads per row: a warp, or a block.
template <typename T, bool e5m2, int lanes>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ QuantizeParams p, bool aligned, bool has_aligned_out_rows) {
  constexpr int rows_per_block = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * rows_per_block + static_cast<int>(threadIdx.x) / lanes;
  if (lanes == kWarp && row >= p.rows) return;
  const T* x = static_cast<const T*>(p.x) + row * p.columns;
  // The first vectors stay in registers; the others are read again.
  Vector<T> kept[kUnroll];
  uint32_t amax_bits = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = static_cast<int64_t>(lane + u * lanes) * kVector;
    kept[u] = load_vector(x + at, p.columns - at, aligned);
    amax_bits = larger<T>(amax_bits, vector_amax(kept[u]));
  }
  constexpr int64_t rest = static_cast<int64_t>(lanes) * kUnroll * kVector;
  for (int64_t at = rest + lane * kVector; at < p.columns; at += lanes * kVector) {
    amax_bits = larger<T>(amax_bits, vector_amax(load_vector(x + at, p.columns - at, aligned)));
  }
  if constexpr (lanes == kWarp) {
    amax_bits = warp_amax<T>(amax_bits, kWarp);
  } else {
    __shared__ uint32_t block_maximum;
    amax_bits = block_amax<T>(amax_bits);
    if (threadIdx.x == 0) block_maximum = amax_bits;
    __syncthreads();
    amax_bits = block_maximum;
  }
  const float scale = scale_from_amax<e5m2>(magnitude<T>(amax_bits), p.power_of_two);
  if (lane == 0) static_cast<float*>(p.scales.at)[row * p.scales.row_stride] = __frcp_rn(scale);
  uint8_t* out = p.data + row * p.columns;
  const auto store = [&](const Vector<T>& v, int64_t at) {
    store_vector(out + at, to_fp8x8<e5m2>([&](int i) { return __fmul_rn(element(v, i), scale); }),
                 p.columns - at, has_aligned_out_rows);
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
  constexpr int64_t elements_per_block = static_cast<int64_t>(kThreads) * kUnroll * kVector;
  return static_cast<unsigned int>((count + elements_per_block - 1) / elements_per_block);
}

}  // namespace

cudaError_t launch_amax(const QuantizeParams& p, cudaStream_t stream) {
  // Each block adds one atomic operation; this many blocks fill any current GPU.
  constexpr unsigned int max_blocks = 2048;
  const int64_t count = p.rows * p.columns;
  return dispatch_type(p.type, [&](auto type) {
    using T = decltype(type);
    amax_kernel<T><<<std::min(blocks_for(count), max_blocks), kThreads, 0, stream>>>(
        static_cast<const T*>(p.x), count, is_aligned(p.x, 16), p.largest);
    return cudaGetLastError();
  });
}

cudaError_t launch_quantize_flat(const QuantizeParams& p, cudaStream_t stream) {
  return dispatch_type(p.type, [&](auto type) {
    return dispatch_format(p.e5m2, [&](auto e5m2) {
      flat_kernel<decltype(type), e5m2>
          <<<blocks_for(p.rows * p.columns), kThreads, 0, stream>>>(p, is_aligned(p.x, 16));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_quantize_rows(const QuantizeParams& p, cudaStream_t stream) {
  const bool has_aligned_out_rows = p.columns % kVector == 0 && is_aligned(p.data, kVector);
  return dispatch_type(p.type, [&](auto type) {
    using T = decltype(type);
    return dispatch_format(p.e5m2, [&](auto e5m2) {
      constexpr int64_t rows_per_block = kThreads / kWarp;
      if (p.columns <= kWarp * kUnroll * kVector) {
        const auto blocks =
            static_cast<unsigned int>((p.rows + rows_per_block - 1) / rows_per_block);
        rows_kernel<T, e5m2, kWarp>
            <<<blocks, kThreads, 0, stream>>>(p, has_aligned_rows<T>(p), has_aligned_out_rows);
      } else {
        rows_kernel<T, e5m2, kThreads><<<static_cast<unsigned int>(p.rows), kThreads, 0, stream>>>(
            p, has_aligned_rows<T>(p), has_aligned_out_rows);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace torch_overlap::cuda
