#include <type_traits>

#include "torch_overlap/gemm/cuda/quantize_values.cuh"

namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 256;

template <bool e5m2>
__device__ __forceinline__ float float_from_fp8(uint8_t byte) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(byte, e5m2 ? __NV_E5M2 : __NV_E4M3);
  return __half2float(__half(half));
}

// Returns 2^(byte - 127), the smallest of which is subnormal; NaN for 255.
__device__ __forceinline__ float float_from_e8m0(uint8_t byte) {
  const uint32_t bits = byte == 0 ? 0x400000U : static_cast<uint32_t>(byte) << 23;
  return byte == 255 ? __uint_as_float(0x7fc00000U) : __uint_as_float(bits);
}

template <ScaleGranularity group>
__device__ __forceinline__ float scale_at(const DequantizeParams& p, int64_t row, int64_t column) {
  const ScaleLayout& scales = p.scales;
  if constexpr (group == ScaleGranularity::kRow32) {
    const int64_t index = scales.swizzled
                              ? swizzled_index(row, column / 32, p.columns / 32)
                              : row * scales.row_stride + column / 32 * scales.column_stride;
    return float_from_e8m0(static_cast<const uint8_t*>(scales.at)[index]);
  } else {
    const auto* at = static_cast<const float*>(scales.at);
    if constexpr (group == ScaleGranularity::kTensor) return *at;
    if constexpr (group == ScaleGranularity::kRow) return at[row * scales.row_stride];
    if constexpr (group == ScaleGranularity::kRow128) {
      return at[row * scales.row_stride + column / 128 * scales.column_stride];
    }
    return at[row / 128 * scales.row_stride + column / 128 * scales.column_stride];
  }
}

template <typename T>
__device__ __forceinline__ T rounded(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

// A thread converts eight consecutive elements. If rows are whole vectors (`aligned`), these share
// a scale.
template <typename T, ScaleGranularity group, bool e5m2>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeParams p, bool aligned) {
  const int64_t count = p.rows * p.columns;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (first >= count) return;
  const int64_t row = first / p.columns;
  const int64_t column = first - row * p.columns;
  T* out = static_cast<T*>(p.out) + first;
  if (!aligned) {
    for (int i = 0; i < kVector && first + i < count; ++i) {
      const int64_t at = (first + i) / p.columns;
      const float scale = scale_at<group>(p, at, first + i - at * p.columns);
      out[i] = rounded<T>(__fmul_rn(float_from_fp8<e5m2>(p.data[first + i]), scale));
    }
    return;
  }
  const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(p.data + first));
  const float scale = scale_at<group>(p, row, column);
  alignas(16) T values[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const auto byte = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
    values[i] = rounded<T>(__fmul_rn(float_from_fp8<e5m2>(byte), scale));
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(uint4)); ++i) {
    reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(values)[i];
  }
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeParams& p, cudaStream_t stream) {
  constexpr int64_t elements_per_block = static_cast<int64_t>(kThreads) * kVector;
  const auto blocks =
      static_cast<unsigned int>((p.rows * p.columns + elements_per_block - 1) / elements_per_block);
  const bool aligned =
      p.columns % kVector == 0 && is_aligned(p.data, kVector) && is_aligned(p.out, 16);
  return dispatch_type(p.type, [&](auto type) {
    return dispatch_format(p.e5m2, [&](auto e5m2) {
      return dispatch_granularity(p.group, [&](auto group) {
        dequantize_kernel<decltype(type), group, e5m2><<<blocks, kThreads, 0, stream>>>(p, aligned);
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace torch_overlap::cuda
