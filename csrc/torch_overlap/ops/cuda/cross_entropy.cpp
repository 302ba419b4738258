#include "torch_overlap/ops/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "torch_overlap/ops/cuda/cross_entropy.h"
#include "torch_overlap/ops/cuda/dense_rows.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// The operands of a kernel, kept while it is launched.
struct CrossEntropyOperands {
  Tensor logits;
  Tensor own;
  cuda::CrossEntropyRows rows;
};

// Returns nothing if the composed form computes it.
std::optional<CrossEntropyOperands> kernel_operands(const Tensor& logits, const Tensor& own) {
  check_cross_entropy(logits, own);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto type = cuda::row_type(logits.scalar_type());
  if (!type || logits.size(-1) > kMost || own.numel() > kMost) return std::nullopt;
  auto matrix = cuda::dense_rows(logits, logits.size(-1));
  auto targets = own.contiguous();
  const cuda::CrossEntropyRows rows{.type = *type,
                                    .rows = own.numel(),
                                    .features = logits.size(-1),
                                    .logits = cuda::rows_of(matrix),
                                    .own = targets.const_data_ptr<int64_t>()};
  return CrossEntropyOperands{std::move(matrix), std::move(targets), rows};
}

Tensor cross_entropy_terms_cuda(const Tensor& logits, const Tensor& own, bool with_sum) {
  const c10::cuda::CUDAGuard guard(logits.device());
  const auto operands = kernel_operands(logits, own);
  if (!operands) return composed_cross_entropy_terms(logits, own, with_sum);
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), with_sum ? 4 : 3);
  auto out = at::empty(sizes, logits.options().dtype(at::kFloat));
  if (out.numel() == 0) return out;
  C10_CUDA_CHECK(cuda::launch_cross_entropy_terms(
      operands->rows, with_sum, out.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor cross_entropy_gradient_cuda(const Tensor& logits, const Tensor& own, const Tensor& largest,
                                   const Tensor& log_sum, const Tensor& grad, double target,
                                   double shift) {
  const c10::cuda::CUDAGuard guard(logits.device());
  const auto operands = kernel_operands(logits, own);
  if (!operands) {
    return composed_cross_entropy_gradient(logits, own, largest, log_sum, grad, target, shift);
  }
  const Tensor of_rows[] = {largest.to(at::kFloat).contiguous(),
                            log_sum.to(at::kFloat).contiguous(), grad.to(at::kFloat).contiguous()};
  for (const Tensor& x : of_rows) {
    TORCH_OVERLAP_CHECK(x.sizes() == own.sizes() && x.device() == own.device(), kValue,
                        "_cross_entropy_gradient: expected numbers of rows of shape ", own.sizes(),
                        " on ", own.device(), ", got ", x.sizes(), " on ", x.device(), ".");
  }
  auto out = at::empty(logits.sizes(), logits.options());
  if (out.numel() == 0) return out;
  const cuda::CrossEntropyGradient params{.largest = of_rows[0].const_data_ptr<float>(),
                                          .log_sum = of_rows[1].const_data_ptr<float>(),
                                          .grad = of_rows[2].const_data_ptr<float>(),
                                          .target = static_cast<float>(target),
                                          .shift = static_cast<float>(shift),
                                          .out = out.data_ptr()};
  C10_CUDA_CHECK(cuda::launch_cross_entropy_gradient(operands->rows, params,
                                                     c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_KERNELS(CUDA, m) {
  m.impl("_cross_entropy_terms", torch_overlap::ops::cross_entropy_terms_cuda);
  m.impl("_cross_entropy_gradient", torch_overlap::ops::cross_entropy_gradient_cuda);
}
