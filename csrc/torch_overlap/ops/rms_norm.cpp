#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rms_norm.h>

#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllReduceRmsNorm = "all_reduce_rms_norm";
constexpr std::string_view kMatmulAllReduceRmsNorm = "matmul_all_reduce_rms_norm";

// The normalized rows, and the rows before normalization.
using NormResults = std::tuple<Tensor, Tensor>;

// Checks the residual and the norm's weight for rows of `shape`, with the dtype and device of
// `like`.
void check_norm_operands(std::string_view op, c10::SymIntArrayRef shape, const Tensor& like,
                         const Tensor& residual, const Tensor& norm_weight, double eps) {
  TORCH_OVERLAP_CHECK(at::isFloatingType(like.scalar_type()) && like.element_size() >= 2, kType, op,
                      ": expected x of float16, bfloat16, float32 or float64, got ",
                      like.scalar_type(), ". Convert it.");
  check_dtype(op, "residual", like, residual);
  check_dtype(op, "the norm's weight", like, norm_weight);
  TORCH_OVERLAP_CHECK(residual.dim() == static_cast<int64_t>(shape.size()), kValue, op,
                      ": expected a residual of shape ", shape, ", that of the sum, got ",
                      residual.sym_sizes(), ". Reshape it.");
  for (int64_t i = 0; i < residual.dim(); ++i) {
    TORCH_OVERLAP_CHECK(shape[i].sym_eq(residual.sym_size(i)).expect_true(__FILE__, __LINE__),
                        kValue, op, ": expected a residual of shape ", shape,
                        ", that of the sum, got ", residual.sym_sizes(), ", which differs in ",
                        "dimension ", i, ". Pass this rank's residual.");
  }
  TORCH_OVERLAP_CHECK(norm_weight.dim() == 1, kValue, op,
                      ": expected the norm's weight with one dimension, got shape ",
                      norm_weight.sym_sizes(), ". Flatten it.");
  check_size(op, "the norm's weight", shape.back(), norm_weight.sym_size(0));
  TORCH_OVERLAP_CHECK(eps >= 0, kValue, op, ": expected eps >= 0, got ", eps,
                      ". It keeps the root from 0.");
}

NormResults results_like(c10::SymIntArrayRef shape, const Tensor& like) {
  return {at::empty_symint(shape, like.options()), at::empty_symint(shape, like.options())};
}

// Applies the residual and the norm to a complete sum. Used if gradients are needed, or if the sum
// was computed by another algorithm.
NormResults add_and_norm(const Tensor& sum, const Tensor& residual, const Tensor& norm_weight,
                         double eps) {
  auto hidden = at::add(residual, sum);
  auto out = at::rms_norm_symint(hidden, {norm_weight.sym_size(0)}, norm_weight, eps);
  return {std::move(out), std::move(hidden)};
}

// `rows` holds this rank's terms and becomes the normalized rows.
void sum_and_norm(const std::shared_ptr<TorchComm>& comm, const Tensor& rows,
                  const std::optional<Tensor>& bias, const Tensor& residual,
                  const Tensor& residual_out, const Tensor& norm_weight, double eps) {
  comm->all_reduce_rms_norm(rows, {.residual = residual.contiguous(),
                                   .residual_out = residual_out,
                                   .weight = norm_weight.contiguous(),
                                   .bias = bias ? bias->contiguous() : Tensor(),
                                   .eps = eps});
}

bool any_needs_autograd(std::initializer_list<Tensor> tensors, const std::optional<Tensor>& bias) {
  return (bias && needs_autograd(*bias)) ||
         std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& tensor) { return needs_autograd(tensor); });
}

std::optional<Tensor> defined_or_none(const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? bias : std::nullopt;
}

// --- all_reduce_rms_norm -------------------------------------------------------------------------

void check_all_reduce(const Tensor& x, const Tensor& residual, const Tensor& weight,
                      const std::optional<Tensor>& bias, int64_t group_size, double eps) {
  check_group_size(kAllReduceRmsNorm, group_size);
  TORCH_OVERLAP_CHECK(x.dim() >= 1, kValue, kAllReduceRmsNorm,
                      ": expected x of one or more dimensions, got a scalar. Use x.reshape(1).");
  check_norm_operands(kAllReduceRmsNorm, x.sym_sizes(), x, residual, weight, eps);
  if (bias) {
    check_dtype(kAllReduceRmsNorm, "bias", x, *bias);
    TORCH_OVERLAP_CHECK(bias->dim() == 1, kValue, kAllReduceRmsNorm,
                        ": expected a bias with one dimension, got shape ", bias->sym_sizes(),
                        ". Flatten it.");
    check_size(kAllReduceRmsNorm, "bias", x.sym_size(-1), bias->sym_size(0));
  }
}

NormResults all_reduce_rms_norm_kernel(const Tensor& x, const Tensor& residual,
                                       const Tensor& weight, const std::optional<Tensor>& bias,
                                       std::string_view comm, int64_t group_size, double eps) {
  check_all_reduce(x, residual, weight, bias, group_size, eps);
  auto [out, hidden] = results_like(x.sym_sizes(), x);
  const auto communicator = find_comm(kAllReduceRmsNorm, comm, group_size);
  out.copy_(x);
  sum_and_norm(communicator, out, bias, residual, hidden, weight, eps);
  return {std::move(out), std::move(hidden)};
}

NormResults all_reduce_rms_norm_meta(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                     const std::optional<Tensor>& bias, std::string_view,
                                     int64_t group_size, double eps) {
  check_all_reduce(x, residual, weight, bias, group_size, eps);
  return results_like(x.sym_sizes(), x);
}

NormResults all_reduce_rms_norm_autograd(const Tensor& x, const Tensor& residual,
                                         const Tensor& weight, const std::optional<Tensor>& bias,
                                         std::string_view comm, int64_t group_size, double eps) {
  const auto present = defined_or_none(bias);
  if (!any_needs_autograd({x, residual, weight}, present)) {
    const BelowAutograd guard;
    return ops::all_reduce_rms_norm(x, residual, weight, present, comm, group_size, eps);
  }
  check_all_reduce(x, residual, weight, present, group_size, eps);
  auto sum = ops::all_reduce(x, "sum", comm, group_size);
  if (present) sum = at::add(sum, *present);
  return add_and_norm(sum, residual, weight, eps);
}

// --- matmul_all_reduce_rms_norm ------------------------------------------------------------------

// Returns the shape of both results.
c10::SymDimVector matmul_shape(const Tensor& x, const Tensor& weight,
                               const std::optional<Tensor>& bias, const Tensor& residual,
                               const Tensor& norm_weight, int64_t group_size, double eps,
                               std::string_view algorithm) {
  check_group_size(kMatmulAllReduceRmsNorm, group_size);
  check_algorithm(kMatmulAllReduceRmsNorm, algorithm);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kMatmulAllReduceRmsNorm,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  check_weight(kMatmulAllReduceRmsNorm, x, weight);
  if (bias) check_bias(kMatmulAllReduceRmsNorm, x, *bias, weight);
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = weight.sym_size(0);
  check_norm_operands(kMatmulAllReduceRmsNorm, shape, x, residual, norm_weight, eps);
  return shape;
}

NormResults matmul_all_reduce_rms_norm_kernel(const Tensor& x, const Tensor& weight,
                                              const std::optional<Tensor>& bias,
                                              const Tensor& residual, const Tensor& norm_weight,
                                              std::string_view comm, int64_t group_size, double eps,
                                              std::string_view algorithm) {
  const auto shape =
      matmul_shape(x, weight, bias, residual, norm_weight, group_size, eps, algorithm);
  const auto communicator = find_comm(kMatmulAllReduceRmsNorm, comm, group_size);
  const auto inputs = to_rows(x, 0);
  const auto chosen = matmul_all_reduce_algorithm(communicator, inputs, weight.size(0), algorithm);
  // The measurement is of a sum without a norm. With a norm after it, one kernel that does both is
  // faster than a sum that saves a copy of its operand.
  const bool is_measured_alone = chosen == Algorithm::low_latency && algorithm != "low_latency";
  if (chosen != Algorithm::sequential && !is_measured_alone) {
    auto sum = ops::matmul_all_reduce(x, weight, bias, comm, group_size, "sum", algorithm);
    auto hidden = at::empty_symint(sum.sym_sizes(), sum.options());
    communicator->add_rms_norm(sum, {.residual = residual.contiguous(),
                                     .residual_out = hidden,
                                     .weight = norm_weight.contiguous(),
                                     .bias = {},
                                     .eps = eps});
    return {std::move(sum), std::move(hidden)};
  }
  auto [out, hidden] = results_like(shape, x);
  linear_out(kMatmulAllReduceRmsNorm, out.flatten(0, -2), inputs, weight, std::nullopt);
  sum_and_norm(communicator, out, bias, residual, hidden, norm_weight, eps);
  return {std::move(out), std::move(hidden)};
}

NormResults matmul_all_reduce_rms_norm_meta(const Tensor& x, const Tensor& weight,
                                            const std::optional<Tensor>& bias,
                                            const Tensor& residual, const Tensor& norm_weight,
                                            std::string_view, int64_t group_size, double eps,
                                            std::string_view algorithm) {
  return results_like(
      matmul_shape(x, weight, bias, residual, norm_weight, group_size, eps, algorithm), x);
}

NormResults matmul_all_reduce_rms_norm_autograd(const Tensor& x, const Tensor& weight,
                                                const std::optional<Tensor>& bias,
                                                const Tensor& residual, const Tensor& norm_weight,
                                                std::string_view comm, int64_t group_size,
                                                double eps, std::string_view algorithm) {
  const auto present = defined_or_none(bias);
  if (!any_needs_autograd({x, weight, residual, norm_weight}, present)) {
    const BelowAutograd guard;
    return ops::matmul_all_reduce_rms_norm(x, weight, present, residual, norm_weight, comm,
                                           group_size, eps, algorithm);
  }
  matmul_shape(x, weight, present, residual, norm_weight, group_size, eps, algorithm);
  const auto sum = ops::matmul_all_reduce(x, weight, present, comm, group_size, "sum", algorithm);
  return add_and_norm(sum, residual, norm_weight, eps);
}

}  // namespace

NormResults all_reduce_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                const std::optional<Tensor>& bias, std::string_view comm,
                                int64_t group_size, double eps) {
  static const auto handle = find_op<decltype(all_reduce_rms_norm_kernel)>("all_reduce_rms_norm");
  return handle.call(x, residual, weight, bias, comm, group_size, eps);
}

NormResults matmul_all_reduce_rms_norm(const Tensor& x, const Tensor& weight,
                                       const std::optional<Tensor>& bias, const Tensor& residual,
                                       const Tensor& norm_weight, std::string_view comm,
                                       int64_t group_size, double eps, std::string_view algorithm) {
  static const auto handle =
      find_op<decltype(matmul_all_reduce_rms_norm_kernel)>("matmul_all_reduce_rms_norm");
  return handle.call(x, weight, bias, residual, norm_weight, comm, group_size, eps, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, str comm,"
      " int group_size, float eps=1e-06) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "matmul_all_reduce_rms_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual,"
      " Tensor norm_weight, str comm, int group_size, float eps=1e-06, str algorithm=\"auto\")"
      " -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_reduce_rms_norm", torch_overlap::ops::all_reduce_rms_norm_kernel);
  m.impl("matmul_all_reduce_rms_norm", torch_overlap::ops::matmul_all_reduce_rms_norm_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("all_reduce_rms_norm", torch_overlap::ops::all_reduce_rms_norm_meta);
  m.impl("matmul_all_reduce_rms_norm", torch_overlap::ops::matmul_all_reduce_rms_norm_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_reduce_rms_norm", torch_overlap::ops::all_reduce_rms_norm_autograd);
  m.impl("matmul_all_reduce_rms_norm", torch_overlap::ops::matmul_all_reduce_rms_norm_autograd);
}
