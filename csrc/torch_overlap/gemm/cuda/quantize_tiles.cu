#include <type_traits>

#include "torch_overlap/gemm/cuda/quantize_values.cuh"

// Kernels in which a block takes 128 x 128 elements: what shares a scale in blocks lies within
// them, and so does what is transposed. A warp has 16 rows, each of its threads 8 rows of one
// vector, 64 elements in registers. Vectors of the transposed tile meet in shared memory.
namespace torch_overlap::cuda {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorsOfRow = kTile / kVector;

// What a thread has of the tile.
struct Place {
  int64_t tile_row;
  int64_t tile_column;
  int warp;
  int half;    // of the warp's rows
  int vector;  // of the tile's rows
  int64_t row;
  int64_t column;

  __device__ __forceinline__ explicit Place(int64_t columns) {
    const int64_t tiles_of_row = (columns + kTile - 1) / kTile;
    tile_row = blockIdx.x / tiles_of_row;
    tile_column = blockIdx.x % tiles_of_row;
    warp = static_cast<int>(threadIdx.x) / 32;
    half = static_cast<int>(threadIdx.x) / kVectorsOfRow % 2;
    vector = static_cast<int>(threadIdx.x) % kVectorsOfRow;
    row = tile_row * kTile + (warp * 2 + half) * kVector;
    column = tile_column * kTile + vector * kVector;
  }
};

template <typename T>
__device__ __forceinline__ void load_rows(Vector<T> (&v)[kVector], const QuantizeParams& p,
                                          const Place& place, bool aligned) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = place.row + i;
    const auto* from = static_cast<const T*>(p.x) + row * p.columns + place.column;
    v[i] = load_vector(from, row < p.rows ? p.columns - place.column : 0, aligned);
  }
}

// The largest of each of the thread's columns, of the 16 rows of its warp.
template <typename T>
__device__ __forceinline__ Vector<T> largest_of_columns(const Vector<T> (&v)[kVector]) {
  Vector<T> most{};
#pragma unroll
  for (int w = 0; w < Vector<T>::kWords; ++w) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      most.words[w] = larger<T>(most.words[w], without_signs<T>(v[i].words[w]));
    }
    most.words[w] = largest_of_lanes<T>(most.words[w], 32, 16);
  }
  return most;
}

// What the warps have of columns, for one another.
template <typename T>
struct ColumnsOfWarps {
  Vector<T> of[kWarps][kVectorsOfRow];

  __device__ __forceinline__ void put(const Place& place, const Vector<T>& most) {
    if (place.half == 0) of[place.warp][place.vector] = most;
  }
  // Of `count` warps from `first` on.
  __device__ __forceinline__ Vector<T> get(const Place& place, int first, int count) const {
    Vector<T> most = of[first][place.vector];
    for (int warp = first + 1; warp < first + count; ++warp) {
#pragma unroll
      for (int w = 0; w < Vector<T>::kWords; ++w) {
        most.words[w] = larger<T>(most.words[w], of[warp][place.vector].words[w]);
      }
    }
    return most;
  }
};

// The magnitude of element i.
template <typename T>
__device__ __forceinline__ uint32_t magnitude_at(const Vector<T>& v, int i) {
  return __float_as_uint(element(v, i)) & 0x7fffffffU;
}

// The largest of the tile.
template <typename T>
__device__ __forceinline__ uint32_t largest_of_tile(const Vector<T> (&v)[kVector]) {
  __shared__ uint32_t of_warps[kWarps];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) most = larger<T>(most, largest_of(v[i]));
  most = largest_of_lanes<T>(most, 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = larger<T>(most, of_warps[i]);
  return most;
}

__device__ __forceinline__ void store_scale(const ScaleLayout& scales, int64_t row, int64_t column,
                                            float scale) {
  static_cast<float*>(scales.at)[row * scales.row_stride + column * scales.column_stride] =
      __frcp_rn(scale);
}

// The byte of one group of 32 in a matrix [rows, columns]; the order of the tensor cores has whole
// tiles, with zeros behind the matrix.
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

// The scale of each of the thread's rows; stores what belongs to them.
template <typename T, ScaleGroup group, bool e5m2>
__device__ __forceinline__ void scales_of_rows(float (&scale)[kVector], const QuantizeParams& p,
                                               const Place& place, const Vector<T> (&v)[kVector]) {
  constexpr int lanes = group == ScaleGroup::kRow32 ? 4 : kVectorsOfRow;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = place.row + i;
    if constexpr (group == ScaleGroup::kRow) {
      scale[i] = row < p.rows ? scale_of<e5m2>(p.largest[row], p.power_of_two) : 1.0F;
      if (row < p.rows && place.tile_column == 0 && place.vector == 0) {
        store_scale(p.scales, row, 0, scale[i]);
      }
      continue;
    }
    const uint32_t largest = magnitude<T>(largest_of_lanes<T>(largest_of(v[i]), lanes));
    const bool stores = place.vector % lanes == 0;
    if constexpr (group == ScaleGroup::kRow32) {
      const int byte = exponent_byte<e5m2>(largest);
      scale[i] = scale_of_byte(byte);
      const int64_t column = place.tile_column * 4 + place.vector / lanes;
      if (stores) store_byte(p.scales, row, column, p.rows, p.columns, byte);
    } else {
      scale[i] = scale_of<e5m2>(largest, p.power_of_two);
      if (stores && row < p.rows) store_scale(p.scales, row, place.tile_column, scale[i]);
    }
  }
}

// The same of its columns, which are rows of the transposed matrix.
template <typename T, ScaleGroup group, bool e5m2>
__device__ __forceinline__ void scales_of_columns(float (&scale)[kVector], const QuantizeParams& p,
                                                  const Place& place,
                                                  const Vector<T> (&v)[kVector]) {
  if constexpr (group == ScaleGroup::kRow) {
    const bool stores = place.tile_row == 0 && place.warp == 0 && place.half == 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int64_t column = place.column + j;
      const bool inside = column < p.columns;
      scale[j] = inside ? scale_of<e5m2>(p.largest[p.rows + column], p.power_of_two) : 1.0F;
      if (inside && stores) store_scale(p.transposed_scales, column, 0, scale[j]);
    }
    return;
  }
  __shared__ ColumnsOfWarps<T> columns;
  columns.put(place, largest_of_columns(v));
  __syncthreads();
  constexpr int warps = group == ScaleGroup::kRow32 ? 2 : kWarps;
  const int first = place.warp / warps * warps;
  const Vector<T> most = columns.get(place, first, warps);
  const bool stores = place.warp == first && place.half == 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int64_t column = place.column + j;
    const uint32_t largest = magnitude_at(most, j);
    if constexpr (group == ScaleGroup::kRow32) {
      const int byte = exponent_byte<e5m2>(largest);
      scale[j] = scale_of_byte(byte);
      const int64_t of_rows = place.tile_row * 4 + place.warp / warps;
      if (stores) store_byte(p.transposed_scales, column, of_rows, p.columns, p.rows, byte);
    } else {
      scale[j] = scale_of<e5m2>(largest, p.power_of_two);
      if (stores && column < p.columns) {
        store_scale(p.transposed_scales, column, place.tile_row, scale[j]);
      }
    }
  }
}

// One scale for all of the tile.
template <typename T, ScaleGroup group, bool e5m2>
__device__ __forceinline__ float scale_of_tile(const QuantizeParams& p, const Place& place,
                                               const Vector<T> (&v)[kVector]) {
  if constexpr (group == ScaleGroup::kTensor) {
    const bool given = p.scale != nullptr;
    const float scale = given ? *p.scale : scale_of<e5m2>(*p.largest, p.power_of_two);
    if (blockIdx.x == 0 && threadIdx.x == 0) store_scale(p.scales, 0, 0, scale);
    if (given) {
      const uint32_t most = largest_of_tile(v);
      if (threadIdx.x == 0) atomicMax(p.largest, magnitude<T>(most));
    }
    return scale;
  } else {
    const float scale = scale_of<e5m2>(magnitude<T>(largest_of_tile(v)), p.power_of_two);
    if (threadIdx.x == 0) {
      store_scale(p.scales, place.tile_row, place.tile_column, scale);
      if (p.transposed != nullptr) {
        store_scale(p.transposed_scales, place.tile_column, place.tile_row, scale);
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

template <typename T, ScaleGroup group, bool e5m2>
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const __grid_constant__ QuantizeParams p, TileAlignment aligned) {
  constexpr bool of_tile = group == ScaleGroup::kTensor || group == ScaleGroup::kBlock128;
  const Place place(p.columns);
  Vector<T> v[kVector];
  load_rows(v, p, place, aligned.x);

  float scale[kVector];
  if constexpr (of_tile) {
    const float one = scale_of_tile<T, group, e5m2>(p, place, v);
#pragma unroll
    for (float& each : scale) each = one;
  } else {
    scales_of_rows<T, group, e5m2>(scale, p, place, v);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int64_t row = place.row + i;
    store_vector(p.data + row * p.columns + place.column,
                 eight_bytes<e5m2>([&](int j) { return __fmul_rn(element(v[i], j), scale[i]); }),
                 row < p.rows ? p.columns - place.column : 0, aligned.data);
  }
  if (p.transposed == nullptr) return;

  if constexpr (!of_tile) scales_of_columns<T, group, e5m2>(scale, p, place, v);
  // Rows of 16 vectors, each in another order, so that neither side meets in banks.
  __shared__ uint2 turned[kTile][kVectorsOfRow];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    turned[place.vector * kVector + j][(place.warp * 2 + place.half) ^ place.vector] =
        eight_bytes<e5m2>([&](int i) { return __fmul_rn(element(v[i], j), scale[j]); });
  }
  __syncthreads();
  const int vector = static_cast<int>(threadIdx.x) % kVectorsOfRow;
  const int64_t row = place.tile_row * kTile + vector * kVector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int of_tile_column = static_cast<int>(threadIdx.x) / kVectorsOfRow + i * kVectorsOfRow;
    const int64_t column = place.tile_column * kTile + of_tile_column;
    store_vector(p.transposed + column * p.rows + row,
                 turned[of_tile_column][vector ^ (of_tile_column / kVector)],
                 column < p.columns ? p.rows - row : 0, aligned.transposed);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    largest_of_lines_kernel(const __grid_constant__ QuantizeParams p, bool aligned) {
  const Place place(p.columns);
  Vector<T> v[kVector];
  load_rows(v, p, place, aligned);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t most = largest_of_lanes<T>(largest_of(v[i]), kVectorsOfRow);
    if (place.vector == 0 && place.row + i < p.rows) {
      atomicMax(p.largest + place.row + i, magnitude<T>(most));
    }
  }
  __shared__ ColumnsOfWarps<T> columns;
  columns.put(place, largest_of_columns(v));
  __syncthreads();
  if (place.warp != 0 || place.half != 0) return;
  const Vector<T> most = columns.get(place, 0, kWarps);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (place.column + j < p.columns) {
      atomicMax(p.largest + p.rows + place.column + j, magnitude_at(most, j));
    }
  }
}

unsigned int tiles_of(const QuantizeParams& p) {
  const auto tiles = [](int64_t size) { return (size + kTile - 1) / kTile; };
  return static_cast<unsigned int>(tiles(p.rows) * tiles(p.columns));
}

}  // namespace

cudaError_t launch_largest_of_lines(const QuantizeParams& p, cudaStream_t stream) {
  return with_type(p.type, [&](auto type) {
    using T = decltype(type);
    largest_of_lines_kernel<T><<<tiles_of(p), kThreads, 0, stream>>>(p, reads_vectors<T>(p));
    return cudaGetLastError();
  });
}

cudaError_t launch_quantize_tiles(const QuantizeParams& p, cudaStream_t stream) {
  return with_type(p.type, [&](auto type) {
    using T = decltype(type);
    const TileAlignment aligned{reads_vectors<T>(p),
                                p.columns % kVector == 0 && is_aligned(p.data, kVector),
                                p.rows % kVector == 0 && is_aligned(p.transposed, kVector)};
    return with_format(p.e5m2, [&](auto e5m2) {
      return with_group(p.group, [&](auto group) {
        tiles_kernel<T, group, e5m2><<<tiles_of(p), kThreads, 0, stream>>>(p, aligned);
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace torch_overlap::cuda
