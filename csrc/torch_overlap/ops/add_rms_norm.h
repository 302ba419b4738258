#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

// h = x + residual and rms_norm(h) * weight in one kernel, and their gradients in two: the norms of
// a transformer layer when training. `residual` may be missing.
namespace torch_overlap::ops {

// Checks the operands. Rows are the last dimension.
void check_add_rms_norm(std::string_view op, const at::Tensor& x,
                        const std::optional<at::Tensor>& residual, const at::Tensor& weight,
                        double eps);

// Returns rms_norm(h) * weight, h, and 1 / sqrt(mean(h^2) + eps) of each row [...], in float32
// (float64 of float64). Without a residual, h has no elements: it is x.
std::tuple<at::Tensor, at::Tensor, at::Tensor> composed_add_rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight,
    double eps);

// Returns the gradients of h and of the weight. `grad` is that of the norm, `hidden_grad` that of h
// by other ways. The inverse is computed again, so that the gradients have gradients.
std::tuple<at::Tensor, at::Tensor> composed_add_rms_norm_backward(
    const at::Tensor& grad, const std::optional<at::Tensor>& hidden_grad, const at::Tensor& hidden,
    const at::Tensor& weight, const at::Tensor& inverse, double eps);

}  // namespace torch_overlap::ops
