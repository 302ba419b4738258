#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/ops/cuda/rows.h"

namespace torch_overlap::cuda {

struct CrossEntropyRows {
  RowType type = RowType::kFloat;
  int64_t rows = 0;
  int64_t features = 0;  // below 2^31
  Rows logits;
  const int64_t* own = nullptr;  // [rows]
};

// `out` [3 or 4, rows]: see composed_cross_entropy_terms().
cudaError_t launch_cross_entropy_terms(const CrossEntropyRows& p, bool with_sum, float* out,
                                       cudaStream_t stream);

struct CrossEntropyGradient {
  const float* largest = nullptr;  // [rows], as those below
  const float* log_sum = nullptr;
  const float* grad = nullptr;
  float target = 0;
  float shift = 0;
  void* out = nullptr;  // [rows, features]
};

cudaError_t launch_cross_entropy_gradient(const CrossEntropyRows& p, const CrossEntropyGradient& g,
                                          cudaStream_t stream);

}  // namespace torch_overlap::cuda
