#pragma once

#include <cuda_fp8.h>

#include <cstdint>

// Scales and values of 8-bit floats, as gemm/quantize.cpp computes them. Magnitudes are the bits of
// fp32 values without signs, which are ordered as integers: infinity is larger than all numbers,
// and NaN larger than infinity. For .cu files.
namespace torch_overlap::cuda {

inline constexpr uint32_t kInfinityBits = 0x7f800000;

template <bool e5m2>
inline constexpr float kMaxFp8Value = e5m2 ? 57344.0F : 448.0F;

// Same as scale_from_amax() of quantize.cpp.
template <bool e5m2>
__device__ __forceinline__ float scale_from_amax(uint32_t largest, bool power_of_two) {
  if (largest == 0 || largest >= kInfinityBits) return 1.0F;
  const float inverse = __frcp_rn(__uint_as_float(largest));
  const float scale = fminf(__fmul_rn(inverse, kMaxFp8Value<e5m2>), 0x1p126F);
  return power_of_two ? __uint_as_float(__float_as_uint(scale) & kInfinityBits) : scale;
}

// Converts two values, which saturate. NaN stays NaN.
template <bool e5m2>
__device__ __forceinline__ uint32_t to_fp8x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE,
                                  e5m2 ? __NV_E5M2 : __NV_E4M3);
}

}  // namespace torch_overlap::cuda
