#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torch_overlap::cuda {

enum class SwigluType { kFloat, kHalf, kBFloat16 };

// A matrix whose rows are dense.
struct SwigluRows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next
};

struct SwigluParams {
  SwigluType type = SwigluType::kFloat;
  int64_t rows = 0;
  int64_t features = 0;
  SwigluRows gate;
  SwigluRows up;
  SwigluRows grad;      // of the result; none for the result itself
  void* out = nullptr;  // [rows, features]; with grad [rows, 2 features]: those of gate and up
};

cudaError_t launch_swiglu(const SwigluParams& p, cudaStream_t stream);

}  // namespace torch_overlap::cuda
