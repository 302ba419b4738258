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
__device__ __forceinline__ void narrow(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void narrow(__half* to, float value) { *to = __float2half_rn(value); }

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
__device__ __forceinline__ float gelu_derivative(float x) {
  const float u = 0.7978845608F * (x + 0.044715F * x * x * x);
  const float s = 1.0F / (1.0F + __expf(-2.0F * u));
  return s + x * 2.0F * s * (1.0F - s) * 0.7978845608F * (1.0F + 3.0F * 0.044715F * x * x);
}

// Applies the epilogue to 64 x 64 sums of a warpgroup that begin at (row, column): sums[4 * i + 2 *
// half + j] is the one of row first + 8 * half, column 8 * i + 2 * (lane % 4) + j.
template <typename Out, int n>
__device__ __forceinline__ void apply_epilogue(const GemmParams& p, float (&sums)[n], int chunk,
                                               int row, int column) {
  const Epilogue& e = p.epilogue;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = row + (static_cast<int>(threadIdx.x) / 32 % 4) * 16 + lane / 4;
  const int left = column + 2 * (lane % 4);
  // For each sum inside the matrix, all loops unrolled: body(sum, row, column).
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int at_row = first + 8 * (i / 2 % 2);
      const int at_column = left + 8 * (i / 4) + i % 2;
      if (at_row < p.m && at_column < p.n) body(sums[chunk * 32 + i], at_row, at_column);
    }
  };
  if (e.lhs_scale != nullptr || e.rhs_scale != nullptr) {
    each([&](float& sum, int r, int c) {
      if (e.lhs_scale != nullptr) sum *= e.lhs_scale[static_cast<int64_t>(r) * e.lhs_scale_step];
      if (e.rhs_scale != nullptr) sum *= e.rhs_scale[static_cast<int64_t>(c) * e.rhs_scale_step];
    });
  }
  if (e.bias_type != VectorType::none) {
    each([&](float& sum, int, int c) { sum += vector_at(e.bias, e.bias_type, c); });
  }
  if (e.pre_gelu != nullptr) {
    each([&](float sum, int r, int c) {
      narrow(static_cast<Out*>(e.pre_gelu) + r * e.pre_gelu_stride + c, sum);
    });
  }
  if (e.gelu) {
    each([](float& sum, int, int) { sum = gelu(sum); });
  }
  if (e.gelu_input != nullptr) {
    each([&](float& sum, int r, int c) {
      sum *= gelu_derivative(
          widen(static_cast<const Out*>(e.gelu_input)[r * e.gelu_input_stride + c]));
    });
  }
  if (e.residual != nullptr) {
    each([&](float& sum, int r, int c) {
      sum += widen(static_cast<const Out*>(e.residual)[r * e.residual_stride + c]);
    });
  }
}

}  // namespace torch_overlap::sm90
