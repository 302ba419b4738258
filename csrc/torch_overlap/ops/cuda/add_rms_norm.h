#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/ops/cuda/rows.h"

namespace torch_overlap::cuda {

// Rows that the kernels take: their elements are held in registers.
inline constexpr int64_t kMaxNormFeatures = 16384;

struct AddRmsNormParams {
  RowType type = RowType::kFloat;
  int64_t rows = 0;
  int64_t features = 0;  // a multiple of a vector's elements
  float eps = 0;
  Rows x;
  Rows residual;                 // none: the rows of x are normalized
  const void* weight = nullptr;  // [features]
  void* norm = nullptr;          // dense rows
  void* hidden = nullptr;        // dense rows; with a residual only
  float* inverse = nullptr;      // [rows]
};

cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream);

struct AddRmsNormGradient {
  RowType type = RowType::kFloat;
  int64_t rows = 0;
  int64_t features = 0;
  Rows grad;
  Rows hidden_grad;  // may be none
  Rows hidden;
  const void* weight = nullptr;
  const float* inverse = nullptr;
  void* sum = nullptr;          // the gradient of h, dense rows
  float* partial = nullptr;     // [blocks, features]: parts of the weight's gradient
  unsigned int blocks = 0;      // at most `rows`
  void* weight_grad = nullptr;  // [features]
};

cudaError_t launch_add_rms_norm_gradient(const AddRmsNormGradient& p, cudaStream_t stream);

}  // namespace torch_overlap::cuda
