#pragma once

#include <ATen/core/Tensor.h>

// The local parts of a cross entropy whose logits are split over ranks by vocabulary: each reads
// the logits once. `own` has the target of each row, counted from the first logit of this rank; a
// target that another rank holds is negative or too large.
namespace torch_overlap::ops {

// Returns [3, ...] of the rows [...] of logits [..., n], in float32 (float64 of float64): the
// largest logit m, the sum of exp(x - m), and the target's logit, 0 if another rank holds it; with
// `with_sum` [4, ...], the last being the sum of x - m. If m is -inf the sums are 0 and -inf.
at::Tensor composed_cross_entropy_terms(const at::Tensor& logits, const at::Tensor& own,
                                        bool with_sum);

// Returns the gradient of the logits, (exp(x - largest - log_sum) - shift) * grad, with target *
// grad added at the targets. largest, log_sum and grad have the shape of the rows.
at::Tensor composed_cross_entropy_gradient(const at::Tensor& logits, const at::Tensor& own,
                                           const at::Tensor& largest, const at::Tensor& log_sum,
                                           const at::Tensor& grad, double target, double shift);

// Checks operands whose memory kernels read.
void check_cross_entropy(const at::Tensor& logits, const at::Tensor& own);

}  // namespace torch_overlap::ops
