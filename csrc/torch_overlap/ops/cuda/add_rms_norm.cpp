#include "torch_overlap/ops/add_rms_norm.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/ops/cuda/add_rms_norm.h"
#include "torch_overlap/ops/cuda/dense_rows.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kBlocksPerProcessor = 2;

// Returns x as a matrix whose rows a kernel can read in vectors.
Tensor vector_rows(const Tensor& x) {
  auto matrix = cuda::dense_rows(x, x.size(-1));
  if (cuda::rows_of(matrix).is_aligned(matrix.element_size())) return matrix;
  // Without the format, a clone of rows that overlap (Tensor.unfold) may be dense along columns.
  return matrix.clone(at::MemoryFormat::Contiguous);
}

bool has_kernel(const Tensor& x) {
  if (!cuda::row_type(x.scalar_type()) || x.numel() == 0) return false;
  const int64_t features = x.size(-1);
  return features * x.element_size() % cuda::kVectorBytes == 0 &&
         features <= cuda::kMaxNormFeatures &&
         x.numel() / features <= std::numeric_limits<int32_t>::max();
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_cuda(const Tensor& x,
                                                     const OptionalTensor& residual,
                                                     const Tensor& weight, double eps) {
  check_add_rms_norm("_add_rms_norm", x, residual, weight, eps);
  if (!has_kernel(x)) return composed_add_rms_norm(x, residual, weight, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto rows = vector_rows(x);
  const auto others = residual ? vector_rows(*residual) : Tensor();
  const auto factors = vector_rows(weight);
  auto norm = at::empty(x.sizes(), x.options());
  auto hidden = residual ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  auto inverse = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  const cuda::AddRmsNormParams p{.type = *cuda::row_type(x.scalar_type()),
                                 .rows = rows.size(0),
                                 .features = rows.size(1),
                                 .eps = static_cast<float>(eps),
                                 .x = cuda::rows_of(rows),
                                 .residual = residual ? cuda::rows_of(others) : cuda::Rows{},
                                 .weight = factors.const_data_ptr(),
                                 .norm = norm.data_ptr(),
                                 .hidden = hidden.data_ptr(),
                                 .inverse = inverse.mutable_data_ptr<float>()};
  C10_CUDA_CHECK(cuda::launch_add_rms_norm(p, c10::cuda::getCurrentCUDAStream()));
  return {std::move(norm), std::move(hidden), std::move(inverse)};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward_cuda(const Tensor& grad,
                                                      const OptionalTensor& hidden_grad,
                                                      const Tensor& hidden, const Tensor& weight,
                                                      const Tensor& inverse, double eps) {
  if (!has_kernel(hidden) || !inverse.is_contiguous() || inverse.scalar_type() != at::kFloat) {
    return composed_add_rms_norm_backward(grad, hidden_grad, hidden, weight, inverse, eps);
  }
  check_add_rms_norm("_add_rms_norm_backward", hidden, grad, weight, eps);
  if (hidden_grad) {
    check_add_rms_norm("_add_rms_norm_backward", hidden, hidden_grad, weight, eps);
  }
  const c10::cuda::CUDAGuard guard(hidden.device());
  const auto rows = vector_rows(hidden);
  const auto grads = vector_rows(grad);
  const auto others = hidden_grad ? vector_rows(*hidden_grad) : Tensor();
  const auto factors = vector_rows(weight);
  TORCH_OVERLAP_CHECK(inverse.numel() == rows.size(0), kValue,
                      "_add_rms_norm_backward: expected one inverse for each of ", rows.size(0),
                      " rows, got ", inverse.numel(), ".");
  const int64_t processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const auto blocks = std::min(rows.size(0), processors * kBlocksPerProcessor);
  auto sum = at::empty(hidden.sizes(), hidden.options());
  auto partial = at::empty({blocks, rows.size(1)}, hidden.options().dtype(at::kFloat));
  auto weight_grad = at::empty(weight.sizes(), weight.options());
  const cuda::AddRmsNormGradient p{
      .type = *cuda::row_type(hidden.scalar_type()),
      .rows = rows.size(0),
      .features = rows.size(1),
      .grad = cuda::rows_of(grads),
      .hidden_grad = hidden_grad ? cuda::rows_of(others) : cuda::Rows{},
      .hidden = cuda::rows_of(rows),
      .weight = factors.const_data_ptr(),
      .inverse = inverse.const_data_ptr<float>(),
      .sum = sum.data_ptr(),
      .partial = partial.mutable_data_ptr<float>(),
      .blocks = static_cast<unsigned int>(blocks),
      .weight_grad = weight_grad.data_ptr()};
  C10_CUDA_CHECK(cuda::launch_add_rms_norm_gradient(p, c10::cuda::getCurrentCUDAStream()));
  return {std::move(sum), std::move(weight_grad)};
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_KERNELS(CUDA, m) {
  m.impl("_add_rms_norm", torch_overlap::ops::add_rms_norm_cuda);
  m.impl("_add_rms_norm_backward", torch_overlap::ops::add_rms_norm_backward_cuda);
}
