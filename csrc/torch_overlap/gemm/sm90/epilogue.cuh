#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "torch_overlap/gemm/sm90/params.h"

// What becomes of a product in registers before it is rounded. Two neighbours of a row at a time.
namespace torch_overlap::sm90 {

__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ uint32_t pack(__half, float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ void unpack(__nv_bfloat16, uint32_t both, float& a, float& b) {
  const float2 two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
  a = two.x;
  b = two.y;
}
__device__ __forceinline__ void unpack(__half, uint32_t both, float& a, float& b) {
  const float2 two = __half22float2(reinterpret_cast<const __half2&>(both));
  a = two.x;
  b = two.y;
}
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

__device__ __forceinline__ float vector_at(const void* vector, VectorType type, int i) {
  if (type == VectorType::f32) return static_cast<const float*>(vector)[i];
  if (type == VectorType::f16) return widen(static_cast<const __half*>(vector)[i]);
  return widen(static_cast<const __nv_bfloat16*>(vector)[i]);
}

// GELU in its tanh form: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu(float x) {
  const float u = 0.7978845608F * (x + 0.044715F * x * x * x);
  return x / (1.0F + __expf(-2.0F * u));
}

// Applies the epilogue to 64 x 64 sums of a warpgroup that begin at `column`: sums[4 * i + 2 * half
// + j] is the one of column 8 * i + 2 * (lane % 4) + j.
template <int n>
__device__ __forceinline__ void apply_epilogue(const GemmParams& p, float (&sums)[n], int chunk,
                                               int column) {
  const Epilogue& e = p.epilogue;
  const int left = column + 2 * (static_cast<int>(threadIdx.x) % 4);
  if (e.bias_type != VectorType::none) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = left + 8 * (i / 2) + i % 2;
      const float bias = at < p.n ? vector_at(e.bias, e.bias_type, at) : 0.0F;
      sums[chunk * 32 + 4 * (i / 2) + i % 2] += bias;
      sums[chunk * 32 + 4 * (i / 2) + 2 + i % 2] += bias;
    }
  }
  if (e.gelu) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[chunk * 32 + i] = gelu(sums[chunk * 32 + i]);
  }
}

}  // namespace torch_overlap::sm90
