#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch_overlap/ops/cuda/rows.h"

// Tensors as the matrices that kernels of rows take.
namespace torch_overlap::cuda {

// Returns x as a matrix with dense rows: x itself if its dimensions before the last are regular.
inline at::Tensor dense_rows(const at::Tensor& x, int64_t features) {
  auto matrix = features == 0 ? x.reshape({0, 0}) : x.reshape({-1, features});
  return matrix.stride(-1) == 1 ? matrix : matrix.contiguous();
}

inline Rows rows_of(const at::Tensor& matrix) {
  return {matrix.const_data_ptr(), matrix.stride(0)};
}

// Returns nothing for dtypes that kernels of rows do not have.
inline std::optional<RowType> row_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return RowType::kFloat;
  if (dtype == at::kHalf) return RowType::kHalf;
  if (dtype == at::kBFloat16) return RowType::kBFloat16;
  return std::nullopt;
}

}  // namespace torch_overlap::cuda
