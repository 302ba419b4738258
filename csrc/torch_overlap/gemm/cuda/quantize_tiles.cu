#include <type_traits>

#include "torch_overlap/gemm/cuda/quantize_values.cuh"

// Kernels in which a block processes 128 x 128 elements: blocks that share a scale are within
// these, and so is what is transposed. A warp has 16 rows; a thread has one vector in 8 of them, 64
// elements in registers. The transposed tile is exchanged through shared memory.
namespace torch_overlap::cuda {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorsPerRow = kTile / kVector;

// A thread's part of the tile.
struct ThreadTile {
  int64_t tile_row;
  int64_t tile_column;
  int warp;
  int half;    // half of the warp's rows
  int vector;  // index of the vector in its rows
  int64_t row;
  int64_t column;

  __device__ __forceinline__ explicit ThreadTile(int64_t columns) {
    const int64_t tiles_per_row = (columns + kTile - 1) / kTile;
    tile_row = blockIdx.x / tiles_per_row;
    tile_column = blockIdx.x % tiles_per_row;
    warp = static_cast<int>(threadIdx.x) / 32;
    half = static_cast<int>(threadIdx.x) / kVectorsPerRow % 2;
    vector = static_cast<int>(threadIdx.x) % kVectorsPerRow;
    row = tile_row * kTile + (warp * 2 + half) * kVector;
    column = tile_column * kTile + vector * kVector;
  }
};

template <typename T>
__device__ __forceinline__ void load_rows(Vector<T> (&v)[kVector], const QuantizeParams& p,
                                          const ThreadTile& thread_tile, bool aligned) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = thread_tile.row + i;
    const auto* from = static_cast<const T*>(p.x) + row * p.columns + thread_tile.column;
    v[i] = load_vector(from, row < p.rows ? p.columns - thread_tile.column : 0, aligned);
  }
}

// Returns the largest magnitude of each of the thread's columns, over the 16 rows of its warp.
template <typename T>
__device__ __forceinline__ Vector<T> column_amax(const Vector<T> (&v)[kVector]) {
  Vector<T> amax_bits{};
#pragma unroll
  for (int w = 0; w < Vector<T>::kWords; ++w) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      amax_bits.words[w] = larger<T>(amax_bits.words[w], abs_bits<T>(v[i].words[w]));
    }
    amax_bits.words[w] = warp_amax<T>(amax_bits.words[w], 32, 16);
  }
  return amax_bits;
}

// Exchanges the column maxima of the warps.
template <typename T>
struct WarpColumnAmax {
  Vector<T> of[kWarps][kVectorsPerRow];

  __device__ __forceinline__ void store(const ThreadTile& thread_tile, const Vector<T>& amax_bits) {
    if (thread_tile.half == 0) of[thread_tile.warp][thread_tile.vector] = amax_bits;
  }
  // Returns the maxima over `count` warps from `first` on.
  __device__ __forceinline__ Vector<T> get(const ThreadTile& thread_tile, int first,
                                           int count) const {
    Vector<T> amax_bits = of[first][thread_tile.vector];
    for (int warp = first + 1; warp < first + count; ++warp) {
#pragma unroll
      for (int w = 0; w < Vector<T>::kWords; ++w) {
        amax_bits.words[w] = larger<T>(amax_bits.words[w], of[warp][thread_tile.vector].words[w]);
      }
    }
    return amax_bits;
  }
};

// Returns the magnitude of element i.
template <typename T>
__device__ __forceinline__ uint32_t magnitude_at(const Vector<T>& v, int i) {
  return __float_as_uint(element(v, i)) & 0x7fffffffU;
}

// Returns the largest magnitude of the tile.
template <typename T>
__device__ __forceinline__ uint32_t tile_amax(const Vector<T> (&v)[kVector]) {
  __shared__ uint32_t warp_maxima[kWarps];
  uint32_t amax_bits = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) amax_bits = larger<T>(amax_bits, vector_amax(v[i]));
  amax_bits = warp_amax<T>(amax_bits, 32);
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = amax_bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) amax_bits = larger<T>(amax_bits, warp_maxima[i]);
  return amax_bits;
}

__device__ __forceinline__ void store_scale(const ScaleLayout& scales, int64_t row, int64_t column,
                                            float scale) {
  static_cast<float*>(scales.at)[row * scales.row_stride + column * scales.column_stride] =
      __frcp_rn(scale);
}

// Stores the byte of one group of 32 in a matrix [rows, columns]. The swizzled order has whole
// tiles, with zeros outside the matrix.
__device__ __forceinline__ void store_byte(const ScaleLayout& scales, int64_t row, int64_t column,
                                           int64_t rows, int64_t columns, int byte) {
  const int64_t groups = columns / 32;
  auto* to = static_cast<uint8_t*>(scales.at);
  if (scales.swizzled) {
    to[swizzled_index(row, column, groups)] = static_cast<uint8_t>(byte);
  } else if (row < rows && column < groups) {
    to[row * scales.row_stride + column * scales.column_stride] = static_cast<uint8_t>(byte);
  }
}

// Computes the scale of each of the thread's rows, and stores the inverse scales.
template <typename T, ScaleGranularity group, bool e5m2>
__device__ __forceinline__ void scales_of_rows(float (&scale)[kVector], const QuantizeParams& p,
                                               const ThreadTile& thread_tile,
                                               const Vector<T> (&v)[kVector]) {
  constexpr int lanes = group == ScaleGranularity::kRow32 ? 4 : kVectorsPerRow;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = thread_tile.row + i;
    if constexpr (group == ScaleGranularity::kRow) {
      scale[i] = row < p.rows ? scale_from_amax<e5m2>(p.largest[row], p.power_of_two) : 1.0F;
      if (row < p.rows && thread_tile.tile_column == 0 && thread_tile.vector == 0) {
        store_scale(p.scales, row, 0, scale[i]);
      }
      continue;
    }
    const uint32_t largest = magnitude<T>(warp_amax<T>(vector_amax(v[i]), lanes));
    const bool stores = thread_tile.vector % lanes == 0;
    if constexpr (group == ScaleGranularity::kRow32) {
      const int byte = e8m0_from_amax_bits<e5m2>(largest);
      scale[i] = scale_from_e8m0(byte);
      const int64_t column = thread_tile.tile_column * 4 + thread_tile.vector / lanes;
      if (stores) store_byte(p.scales, row, column, p.rows, p.columns, byte);
    } else {
      scale[i] = scale_from_amax<e5m2>(largest, p.power_of_two);
      if (stores && row < p.rows) store_scale(p.scales, row, thread_tile.tile_column, scale[i]);
    }
  }
}

// The same for its columns, which are rows of the transposed matrix.
template <typename T, ScaleGranularity group, bool e5m2>
__device__ __forceinline__ void scales_of_columns(float (&scale)[kVector], const QuantizeParams& p,
                                                  const ThreadTile& thread_tile,
                                                  const Vector<T> (&v)[kVector]) {
  if constexpr (group == ScaleGranularity::kRow) {
    const bool stores = thread_tile.tile_row == 0 && thread_tile.warp == 0 && thread_tile.half == 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int64_t column = thread_tile.column + j;
      const bool inside = column < p.columns;
      scale[j] = inside ? scale_from_amax<e5m2>(p.largest[p.rows + column], p.power_of_two) : 1.0F;
      if (inside && stores) store_scale(p.transposed_scales, column, 0, scale[j]);
    }
    return;
  }
  __shared__ WarpColumnAmax<T> columns;
  columns.store(thread_tile, column_amax(v));
  __syncthreads();
  constexpr int warps = group == ScaleGranularity::kRow32 ? 2 : kWarps;
  const int first = thread_tile.warp / warps * warps;
  const Vector<T> amax_bits = columns.get(thread_tile, first, warps);
  const bool stores = thread_tile.warp == first && thread_tile.half == 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int64_t column = thread_tile.column + j;
    const uint32_t largest = magnitude_at(amax_bits, j);
    if constexpr (group == ScaleGranularity::kRow32) {
      const int byte = e8m0_from_amax_bits<e5m2>(largest);
      scale[j] = scale_from_e8m0(byte);
      const int64_t of_rows = thread_tile.tile_row * 4 + thread_tile.warp / warps;
      if (stores) store_byte(p.transposed_scales, column, of_rows, p.columns, p.rows, byte);
    } else {
      scale[j] = scale_from_amax<e5m2>(largest, p.power_of_two);
      if (stores && column < p.columns) {
        store_scale(p.transposed_scales, column, thread_tile.tile_row, scale[j]);
      }
    }
  }
}

// Returns the scale of the whole tile, and stores its inverse.
template <typename T, ScaleGranularity group, bool e5m2>
__device__ __forceinline__ float scale_of_tile(const QuantizeParams& p,
                                               const ThreadTile& thread_tile,
                                               const Vector<T> (&v)[kVector]) {
  if constexpr (group == ScaleGranularity::kTensor) {
    const bool given = p.scale != nullptr;
    const float scale = given ? *p.scale : scale_from_amax<e5m2>(*p.largest, p.power_of_two);
    if (blockIdx.x == 0 && threadIdx.x == 0) store_scale(p.scales, 0, 0, scale);
    if (given) {
      const uint32_t amax_bits = tile_amax(v);
      if (threadIdx.x == 0) atomicMax(p.largest, magnitude<T>(amax_bits));
    }
    return scale;
  } else {
    const float scale = scale_from_amax<e5m2>(magnitude<T>(tile_amax(v)), p.power_of_two);
    if (threadIdx.x == 0) {
      store_scale(p.scales, thread_tile.tile_row, thread_tile.tile_column, scale);
      if (p.transposed != nullptr) {
        store_scale(p.transposed_scales, thread_tile.tile_column, thread_tile.tile_row, scale);
      }
    }
    return scale;
  }
}

struct TileAlignment {
  bool x;
  bool data;
  bool transposed;
};

template <typename T, ScaleGranularity group, bool e5m2>
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const __grid_constant__ QuantizeParams p, TileAlignment aligned) {
  constexpr bool is_per_tile =
      group == ScaleGranularity::kTensor || group == ScaleGranularity::kBlock128;
  const ThreadTile thread_tile(p.columns);
  Vector<T> v[kVector];
  load_rows(v, p, thread_tile, aligned.x);

  float scale[kVector];
  if constexpr (is_per_tile) {
    const float one = scale_of_tile<T, group, e5m2>(p, thread_tile, v);
#pragma unroll
    for (float& each : scale) each = one;
  } else {
    scales_of_rows<T, group, e5m2>(scale, p, thread_tile, v);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = thread_tile.row + i;
    store_vector(p.data + row * p.columns + thread_tile.column,
                 to_fp8x8<e5m2>([&](int j) { return __fmul_rn(element(v[i], j), scale[i]); }),
                 row < p.rows ? p.columns - thread_tile.column : 0, aligned.data);
  }
  if (p.transposed == nullptr) return;

  if constexpr (!is_per_tile) scales_of_columns<T, group, e5m2>(scale, p, thread_tile, v);
  // Rows of 16 vectors, permuted differently in each row to avoid bank conflicts on both sides.
  __shared__ uint2 transposed_tile[kTile][kVectorsPerRow];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    transposed_tile[thread_tile.vector * kVector + j]
                   [(thread_tile.warp * 2 + thread_tile.half) ^ thread_tile.vector] =
                       to_fp8x8<e5m2>([&](int i) { return __fmul_rn(element(v[i], j), scale[j]); });
  }
  __syncthreads();
  const int vector = static_cast<int>(threadIdx.x) % kVectorsPerRow;
  const int64_t row = thread_tile.tile_row * kTile + vector * kVector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int of_tile_column = static_cast<int>(threadIdx.x) / kVectorsPerRow + i * kVectorsPerRow;
    const int64_t column = thread_tile.tile_column * kTile + of_tile_column;
    store_vector(p.transposed + column * p.rows + row,
                 transposed_tile[of_tile_column][vector ^ (of_tile_column / kVector)],
                 column < p.columns ? p.rows - row : 0, aligned.transposed);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_and_column_amax_kernel(const __grid_constant__ QuantizeParams p, bool aligned) {
  const ThreadTile thread_tile(p.columns);
  Vector<T> v[kVector];
  load_rows(v, p, thread_tile, aligned);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t amax_bits = warp_amax<T>(vector_amax(v[i]), kVectorsPerRow);
    if (thread_tile.vector == 0 && thread_tile.row + i < p.rows) {
      atomicMax(p.largest + thread_tile.row + i, magnitude<T>(amax_bits));
    }
  }
  __shared__ WarpColumnAmax<T> columns;
  columns.store(thread_tile, column_amax(v));
  __syncthreads();
  if (thread_tile.warp != 0 || thread_tile.half != 0) return;
  const Vector<T> amax_bits = columns.get(thread_tile, 0, kWarps);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (thread_tile.column + j < p.columns) {
      atomicMax(p.largest + p.rows + thread_tile.column + j, magnitude_at(amax_bits, j));
    }
  }
}

unsigned int tiles_of(const QuantizeParams& p) {
  const auto tiles = [](int64_t size) { return (size + kTile - 1) / kTile; };
  return static_cast<unsigned int>(tiles(p.rows) * tiles(p.columns));
}

}  // namespace

cudaError_t launch_row_and_column_amax(const QuantizeParams& p, cudaStream_t stream) {
  return dispatch_type(p.type, [&](auto type) {
    using T = decltype(type);
    row_and_column_amax_kernel<T><<<tiles_of(p), kThreads, 0, stream>>>(p, has_aligned_rows<T>(p));
    return cudaGetLastError();
  });
}

cudaError_t launch_quantize_tiles(const QuantizeParams& p, cudaStream_t stream) {
  return dispatch_type(p.type, [&](auto type) {
    using T = decltype(type);
    const TileAlignment aligned{has_aligned_rows<T>(p),
                                p.columns % kVector == 0 && is_aligned(p.data, kVector),
                                p.rows % kVector == 0 && is_aligned(p.transposed, kVector)};
    return dispatch_format(p.e5m2, [&](auto e5m2) {
      return dispatch_granularity(p.group, [&](auto group) {
        tiles_kernel<T, group, e5m2><<<tiles_of(p), kThreads, 0, stream>>>(p, aligned);
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace torch_overlap::cuda
