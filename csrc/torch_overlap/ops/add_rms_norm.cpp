#include "torch_overlap/ops/add_rms_norm.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>

#include "torch_overlap/ops/composed.h"

namespace torch_overlap::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;
using NormAndHidden = std::tuple<Tensor, Tensor>;

constexpr char kAddRmsNorm[] = "add_rms_norm";
constexpr char kNormForward[] = "_add_rms_norm";
constexpr char kNormGradient[] = "_add_rms_norm_backward";
using NormForward = Composed<kNormForward, composed_add_rms_norm>;
using NormGradient = Composed<kNormGradient, composed_add_rms_norm_backward>;

at::ScalarType wide_type(const Tensor& x) { return at::toOpMathType(x.scalar_type()); }

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& x, const OptionalTensor& residual,
                                                const Tensor& weight, double eps) {
  check_add_rms_norm(kAddRmsNorm, x, residual, weight, eps);
  auto rows = x.sym_sizes().vec();
  rows.pop_back();
  auto norm = at::empty_symint(x.sym_sizes(), x.options());
  auto hidden =
      residual ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  return {std::move(norm), std::move(hidden),
          at::empty_symint(rows, x.options().dtype(wide_type(x)))};
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const OptionalTensor&, const Tensor& hidden,
                                         const Tensor& weight, const Tensor&, double) {
  return {at::empty_symint(hidden.sym_sizes(), hidden.options()),
          at::empty_symint(weight.sym_sizes(), weight.options())};
}

class AddRmsNorm : public Function<AddRmsNorm> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const OptionalTensor& residual, const Tensor& weight, double eps) {
    auto [norm, hidden, inverse] = NormForward::call_below_autograd(x, residual, weight, eps);
    context->save_for_backward({residual ? hidden : x, weight, inverse});
    context->saved_data["adds"] = residual.has_value();
    context->saved_data["eps"] = eps;
    context->set_materialize_grads(false);
    if (!residual || !(x.requires_grad() || residual->requires_grad())) {
      context->mark_non_differentiable({hidden});
    }
    return {std::move(norm), std::move(hidden)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const bool adds = context->saved_data["adds"].toBool();
    const auto hidden_grad = adds && grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    if (!grads[0].defined()) {
      const auto sum = hidden_grad.value_or(Tensor());
      return {sum, sum, Tensor(), Tensor()};
    }
    auto [sum, weight_grad] = NormGradient::call(grads[0], hidden_grad, saved[0], saved[1],
                                                 saved[2], context->saved_data["eps"].toDouble());
    return {sum, adds ? sum : Tensor(), std::move(weight_grad), Tensor()};
  }
};

// By operators of torch, for gradients of any order and mode.
NormAndHidden differentiable(const Tensor& x, const OptionalTensor& residual, const Tensor& weight,
                             double eps) {
  auto hidden = residual ? x + *residual : x;
  auto norm = at::rms_norm_symint(hidden, weight.sym_sizes(), weight, eps);
  return {std::move(norm), residual ? std::move(hidden) : at::empty({0}, x.options())};
}

NormAndHidden add_rms_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight,
                           double eps) {
  check_add_rms_norm(kAddRmsNorm, x, residual, weight, eps);
  auto [norm, hidden, inverse] = NormForward::call_below_autograd(x, residual, weight, eps);
  return {std::move(norm), std::move(hidden)};
}

NormAndHidden add_rms_norm_autograd(const Tensor& x, const OptionalTensor& residual,
                                    const Tensor& weight, double eps) {
  check_add_rms_norm(kAddRmsNorm, x, residual, weight, eps);
  if (has_tangent(x) || has_tangent(weight) || (residual && has_tangent(*residual))) {
    return differentiable(x, residual, weight, eps);
  }
  if (needs_autograd(x) || needs_autograd(weight) || needs_autograd(residual)) {
    auto results = AddRmsNorm::apply(x, residual, weight, eps);
    return {std::move(results[0]), std::move(results[1])};
  }
  return add_rms_norm(x, residual, weight, eps);
}

}  // namespace

void check_add_rms_norm(std::string_view op, const Tensor& x, const OptionalTensor& residual,
                        const Tensor& weight, double eps) {
  TORCH_OVERLAP_CHECK(at::isFloatingType(x.scalar_type()) && x.element_size() > 1, kType, op,
                      ": expected x of float16, bfloat16, float32 or float64, got ",
                      x.scalar_type(), ". Convert it.");
  check_dtype(op, "weight", x, weight);
  TORCH_OVERLAP_CHECK(x.dim() >= 1 && weight.dim() == 1, kValue, op,
                      ": expected x [..., n] and weight [n], got shapes ", x.sym_sizes(), " and ",
                      weight.sym_sizes(), ". Reshape them.");
  check_size(op, "weight", x.sym_size(-1), weight.sym_size(0));
  TORCH_OVERLAP_CHECK(eps >= 0, kValue, op, ": expected eps >= 0, got ", eps,
                      ". It keeps the root from 0.");
  if (!residual) return;
  check_dtype(op, "residual", x, *residual);
  TORCH_OVERLAP_CHECK(residual->dim() == x.dim(), kValue, op, ": expected a residual of shape ",
                      x.sym_sizes(), " as x, got ", residual->sym_sizes(), ". Reshape it.");
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    TORCH_OVERLAP_CHECK(
        residual->sym_size(dim).sym_eq(x.sym_size(dim)).expect_true(__FILE__, __LINE__), kValue, op,
        ": expected a residual of shape ", x.sym_sizes(), " as x, got ", residual->sym_sizes(),
        ". Reshape it.");
  }
}

std::tuple<Tensor, Tensor, Tensor> composed_add_rms_norm(const Tensor& x,
                                                         const OptionalTensor& residual,
                                                         const Tensor& weight, double eps) {
  auto hidden = residual ? x + *residual : x;
  auto inverse = at::rsqrt(hidden.to(wide_type(x)).square().mean(-1) + eps);
  auto norm = at::rms_norm_symint(hidden, weight.sym_sizes(), weight, eps).contiguous();
  if (!residual) hidden = at::empty({0}, x.options());
  return {std::move(norm), hidden.contiguous(), std::move(inverse)};
}

std::tuple<Tensor, Tensor> composed_add_rms_norm_backward(const Tensor& grad,
                                                          const OptionalTensor& hidden_grad,
                                                          const Tensor& hidden,
                                                          const Tensor& weight, const Tensor&,
                                                          double eps) {
  const auto wide = wide_type(hidden);
  const auto h = hidden.to(wide);
  const auto inverse = at::rsqrt(h.square().mean(-1, /*keepdim=*/true) + eps);
  const auto normal = h * inverse;
  const auto wide_grad = grad.to(wide);
  const auto g = wide_grad * weight.to(wide);
  auto sum = inverse * (g - normal * (g * normal).mean(-1, /*keepdim=*/true));
  if (hidden_grad) sum = sum + hidden_grad->to(wide);
  const auto weight_grad = at::sum_to(wide_grad * normal, weight.sym_sizes());
  return {sum.to(hidden.scalar_type()).contiguous(), weight_grad.to(weight.scalar_type())};
}

TORCH_OVERLAP_SCHEMAS(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, "
    "Tensor)",
    "_add_rms_norm_backward(Tensor grad, Tensor? hidden_grad, Tensor hidden, Tensor weight, "
    "Tensor inverse, float eps) -> (Tensor, Tensor)")
TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) { m.impl(kAddRmsNorm, add_rms_norm); }
TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) { m.impl(kAddRmsNorm, differentiable); }
TORCH_OVERLAP_KERNELS(Autograd, m) { m.impl(kAddRmsNorm, add_rms_norm_autograd); }
TORCH_OVERLAP_COMPOSED(kNormForward, composed_add_rms_norm, forward_meta, NormForward::autograd)
TORCH_OVERLAP_COMPOSED(kNormGradient, composed_add_rms_norm_backward, backward_meta,
                       NormGradient::autograd)

}  // namespace torch_overlap::ops
