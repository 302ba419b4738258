#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "torch_overlap/ops/cuda/rows.h"

namespace torch_overlap::cuda {

struct SwigluParams {
  RowType type = RowType::kFloat;
  int64_t rows = 0;
  int64_t features = 0;
  Rows gate;
  Rows up;
  Rows grad;            // of the result; none for the result itself
  void* out = nullptr;  // [rows, features]; with grad [rows, 2 features]: those of gate and up
};

cudaError_t launch_swiglu(const SwigluParams& p, cudaStream_t stream);

}  // namespace torch_overlap::cuda
