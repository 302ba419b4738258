#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "torch_overlap/gemm/sm90/params.h"

// The epilogue of a product in registers, before it is rounded. Processes two neighbours of a row
// at a time.
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

__device__ __forceinline__ float load_element(const void* vector, ElementType type, int i) {
  if (type == ElementType::f32) return static_cast<const float*>(vector)[i];
  if (type == ElementType::f16) return widen(static_cast<const __half*>(vector)[i]);
  return widen(static_cast<const __nv_bfloat16*>(vector)[i]);
}

// Returns the product of the scales of both 8-bit operands; 1 if each row has its own.
__device__ __forceinline__ float scale_of(const Epilogue& e) {
  return e.scaled_by_row ? 1.0F : *e.lhs_scale * *e.rhs_scale;
}

template <int n>
__device__ __forceinline__ void multiply_by(float factor, float (&sums)[n]) {
#pragma unroll
  for (float& sum : sums) sum *= factor;
}

// Scales 64 x 2 n sums of a warpgroup that begin at `column`. `lhs_scale` are the scales of its
// `rows` rows. A lane loads the scales of two of 64 columns, and the others get them by shuffles:
// separate loads for every sum would take the registers that the sums need.
template <int n>
__device__ __forceinline__ void scale_by_row(const GemmParams& p, float (&sums)[n],
                                             const float* lhs_scale, int rows, int column) {
  constexpr unsigned int kAll = 0xffffffff;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  const float first = row < rows ? lhs_scale[row] : 0.0F;
  const float second = row + 8 < rows ? lhs_scale[row + 8] : 0.0F;
#pragma unroll
  for (int piece = 0; piece < (n + 31) / 32; ++piece) {
    const int at = column + 64 * piece + 2 * lane;
    float mine[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) mine[j] = at + j < p.n ? p.epilogue.rhs_scale[at + j] : 0.0F;
#pragma unroll
    for (int i = 0; i < 8 && piece * 32 + 4 * i < n; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = __shfl_sync(kAll, mine[j], 4 * i + lane % 4);
        sums[piece * 32 + 4 * i + j] *= first * factor;
        sums[piece * 32 + 4 * i + 2 + j] *= second * factor;
      }
    }
  }
}

// GELU in its tanh form: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu(float x) {
  const float u = 0.7978845608F * (x + 0.044715F * x * x * x);
  return x / (1.0F + __expf(-2.0F * u));
}

// Applies the epilogue to 64 x 64 sums of a warpgroup that begin at `column`, or to fewer columns
// if the warpgroup has fewer: sums[4 * i + 2 * half + j] is in column 8 * i + 2 * (lane % 4) + j.
template <int n>
__device__ __forceinline__ void apply_epilogue(const GemmParams& p, float (&sums)[n], int chunk,
                                               int column) {
  const Epilogue& e = p.epilogue;
  const int left = column + 2 * (static_cast<int>(threadIdx.x) % 4);
  if (e.bias_type != ElementType::none) {
#pragma unroll
    for (int i = 0; i < 16 && chunk * 32 + 2 * i < n; ++i) {
      const int at = left + 8 * (i / 2) + i % 2;
      const float bias = at < p.n ? load_element(e.bias, e.bias_type, at) : 0.0F;
      sums[chunk * 32 + 4 * (i / 2) + i % 2] += bias;
      sums[chunk * 32 + 4 * (i / 2) + 2 + i % 2] += bias;
    }
  }
  if (e.gelu) {
#pragma unroll
    for (int i = 0; i < 32 && chunk * 32 + i < n; ++i) {
      sums[chunk * 32 + i] = gelu(sums[chunk * 32 + i]);
    }
  }
}

}  // namespace torch_overlap::sm90
