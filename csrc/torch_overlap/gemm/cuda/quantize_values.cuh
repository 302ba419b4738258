#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "torch_overlap/common/cuda/float8_device.h"
#include "torch_overlap/gemm/cuda/quantize.h"

// Elements, magnitudes and scales of the quantization kernels.
//
// A thread processes vectors of eight elements, kept as they were read. Magnitudes are compared as
// integers, two at a time if they have 16 bits: in this order infinity is larger than all numbers,
// and NaN larger than infinity, so a NaN is never lost.
namespace torch_overlap::cuda {

inline constexpr int kVector = 8;

template <typename T>
struct Vector {
  static constexpr int kWords = kVector * sizeof(T) / sizeof(uint32_t);
  uint32_t words[kWords];
};

template <typename T>
__device__ __forceinline__ float element(const Vector<T>& v, int i) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(v.words[i]);
  } else {
    const auto bits = static_cast<uint16_t>(v.words[i / 2] >> (16 * (i % 2)));
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    } else {
      return __half2float(__ushort_as_half(bits));
    }
  }
}

// Loads `valid` elements from `from`, followed by zeros. `aligned`: whole vectors can be loaded at
// once.
template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* from, int64_t valid, bool aligned) {
  Vector<T> v{};
  if (aligned && valid >= kVector) {
#pragma unroll
    for (int i = 0; i < Vector<T>::kWords / 4; ++i) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(from) + i);
      v.words[4 * i] = part.x;
      v.words[4 * i + 1] = part.y;
      v.words[4 * i + 2] = part.z;
      v.words[4 * i + 3] = part.w;
    }
    return v;
  }
  constexpr int elements_per_word = sizeof(uint32_t) / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= valid) break;
    uint32_t bits;
    if constexpr (elements_per_word == 1) {
      bits = __float_as_uint(from[i]);
    } else {
      bits = reinterpret_cast<const uint16_t*>(from)[i];
    }
    v.words[i / elements_per_word] |= bits << (16 * (i % elements_per_word));
  }
  return v;
}

__device__ __forceinline__ void store_vector(uint8_t* to, uint2 bytes, int64_t valid,
                                             bool aligned) {
  if (aligned && valid >= kVector) {
    *reinterpret_cast<uint2*>(to) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < valid) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
  }
}

// --- Magnitudes: words of one fp32, or of two 16-bit numbers, without signs.

template <typename T>
__device__ __forceinline__ uint32_t abs_bits(uint32_t word) {
  return word & (sizeof(T) == 4 ? 0x7fffffffU : 0x7fff7fffU);
}

template <typename T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return a > b ? a : b;
  } else {
    return __vmaxu2(a, b);
  }
}

// Returns the largest magnitude of a vector. With 16-bit elements it may be in either half of the
// word.
template <typename T>
__device__ __forceinline__ uint32_t vector_amax(const Vector<T>& v) {
  uint32_t amax_bits = abs_bits<T>(v.words[0]);
#pragma unroll
  for (int i = 1; i < Vector<T>::kWords; ++i) {
    amax_bits = larger<T>(amax_bits, abs_bits<T>(v.words[i]));
  }
  return amax_bits;
}

// Reduces over lanes that differ in the bits from `first` up to below `lanes`.
template <typename T>
__device__ __forceinline__ uint32_t warp_amax(uint32_t amax_bits, int lanes, int first = 1) {
#pragma unroll
  for (int i = first; i < lanes; i *= 2) {
    amax_bits = larger<T>(amax_bits, __shfl_xor_sync(0xffffffffU, amax_bits, i));
  }
  return amax_bits;
}

template <typename T>
__device__ __forceinline__ uint32_t fp32_bits(uint16_t bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return static_cast<uint32_t>(bits) << 16;
  } else {
    return __float_as_uint(__half2float(__ushort_as_half(bits)));
  }
}

// Returns the fp32 bits of the larger half.
template <typename T>
__device__ __forceinline__ uint32_t magnitude(uint32_t amax_bits) {
  if constexpr (sizeof(T) == 4) {
    return amax_bits;
  } else {
    const uint32_t low = amax_bits & 0xffffU;
    const uint32_t high = amax_bits >> 16;
    return fp32_bits<T>(static_cast<uint16_t>(low > high ? low : high));
  }
}

// --- Scales.

// Same as e8m0_from_amax() of quantize.cpp. Subnormal values are below the range anyway.
template <bool e5m2>
__device__ __forceinline__ int e8m0_from_amax_bits(uint32_t largest) {
  if (largest >= kInfinityBits) return largest == kInfinityBits ? 253 : 255;
  constexpr int exponent_of_largest = e5m2 ? 16 : 9;
  constexpr uint32_t seven_eighths = 0x600000;
  const int exponent = static_cast<int>(largest >> 23) + 1 - exponent_of_largest;
  const int up = (largest & 0x7fffffU) > seven_eighths ? 1 : 0;
  return largest == 0 ? 0 : min(max(exponent + up, 0), 253);
}

__device__ __forceinline__ float scale_from_e8m0(int byte) {
  return __uint_as_float(static_cast<uint32_t>(max(254 - byte, 1)) << 23);
}

// Returns the index of E8M0 scale (row, column), of `columns` per row, in the swizzled order.
__device__ __forceinline__ int64_t swizzled_index(int64_t row, int64_t column, int64_t columns) {
  const int64_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

// --- 8-bit values.

// Converts value(0) ... value(7).
template <bool e5m2, typename Value>
__device__ __forceinline__ uint2 to_fp8x8(const Value& value) {
  uint2 bytes;
  bytes.x = to_fp8x2<e5m2>(value(0), value(1)) | to_fp8x2<e5m2>(value(2), value(3)) << 16;
  bytes.y = to_fp8x2<e5m2>(value(4), value(5)) | to_fp8x2<e5m2>(value(6), value(7)) << 16;
  return bytes;
}

// --- Dispatch of runtime types to template types.

template <typename Function>
cudaError_t dispatch_type(HighPrecisionType type, const Function& function) {
  switch (type) {
    case HighPrecisionType::kFloat:
      return function(float{});
    case HighPrecisionType::kHalf:
      return function(__half{});
    case HighPrecisionType::kBFloat16:
      return function(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

template <typename Function>
cudaError_t dispatch_format(bool e5m2, const Function& function) {
  return e5m2 ? function(std::true_type{}) : function(std::false_type{});
}

// Argument of the function of dispatch_granularity(): Group<group>{}.
template <ScaleGranularity group>
using Group = std::integral_constant<ScaleGranularity, group>;

template <typename Function>
cudaError_t dispatch_granularity(ScaleGranularity group, const Function& function) {
  switch (group) {
    case ScaleGranularity::kTensor:
      return function(Group<ScaleGranularity::kTensor>{});
    case ScaleGranularity::kRow:
      return function(Group<ScaleGranularity::kRow>{});
    case ScaleGranularity::kRow128:
      return function(Group<ScaleGranularity::kRow128>{});
    case ScaleGranularity::kBlock128:
      return function(Group<ScaleGranularity::kBlock128>{});
    case ScaleGranularity::kRow32:
      return function(Group<ScaleGranularity::kRow32>{});
  }
  return cudaErrorInvalidValue;
}

inline bool is_aligned(const void* memory, size_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

// True if each row of x is aligned for loads of whole vectors.
template <typename T>
bool has_aligned_rows(const QuantizeParams& p) {
  return is_aligned(p.x, 16) && p.columns * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

}  // namespace torch_overlap::cuda
