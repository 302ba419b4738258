#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

// Conversions between element types and their accumulators. For .cu files.
namespace torch_overlap::cuda {

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return static_cast<Accumulator<T>>(value);
  }
}

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename T, int n>
struct alignas(n * sizeof(T)) Pack {
  T values[n];
};

}  // namespace torch_overlap::cuda
