#include "torch_overlap/ops/cross_entropy.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <limits>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kTerms = "_cross_entropy_terms";
constexpr const char* kGradient = "_cross_entropy_gradient";

Tensor held_targets(const Tensor& logits, const Tensor& own) {
  return at::logical_and(own >= 0, own < logits.sym_size(-1));
}

Tensor terms_meta(const Tensor& logits, const Tensor& own, bool with_sum) {
  auto sizes = own.sym_sizes().vec();
  sizes.insert(sizes.begin(), with_sum ? 4 : 3);
  return at::empty_symint(sizes, logits.options().dtype(at::toOpMathType(logits.scalar_type())));
}

Tensor gradient_meta(const Tensor& logits, const Tensor&, const Tensor&, const Tensor&,
                     const Tensor&, double, double) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

Tensor terms_autograd(const Tensor& logits, const Tensor& own, bool with_sum) {
  if (needs_autograd(logits)) return composed_cross_entropy_terms(logits, own, with_sum);
  static const auto op = find_op<decltype(composed_cross_entropy_terms)>(kTerms);
  const BelowAutograd guard;
  return op.call(logits, own, with_sum);
}

Tensor gradient_autograd(const Tensor& logits, const Tensor& own, const Tensor& largest,
                         const Tensor& log_sum, const Tensor& grad, double target, double shift) {
  if (needs_autograd(logits) || needs_autograd(log_sum) || needs_autograd(grad)) {
    return composed_cross_entropy_gradient(logits, own, largest, log_sum, grad, target, shift);
  }
  static const auto op = find_op<decltype(composed_cross_entropy_gradient)>(kGradient);
  const BelowAutograd guard;
  return op.call(logits, own, largest, log_sum, grad, target, shift);
}

}  // namespace

void check_cross_entropy(const Tensor& logits, const Tensor& own) {
  TORCH_OVERLAP_CHECK(logits.dim() >= 1 && logits.size(-1) > 0 &&
                          own.sizes() == logits.sizes().slice(0, logits.dim() - 1),
                      kValue, kTerms, ": expected logits [..., n] and targets [...], got shapes ",
                      logits.sizes(), " and ", own.sizes(), ".");
  TORCH_OVERLAP_CHECK(own.scalar_type() == at::kLong && own.device() == logits.device(), kType,
                      kTerms, ": expected int64 targets on ", logits.device(), ", got ",
                      own.scalar_type(), " on ", own.device(), ".");
}

Tensor composed_cross_entropy_terms(const Tensor& logits, const Tensor& own, bool with_sum) {
  const auto x = logits.to(at::toOpMathType(logits.scalar_type()));
  const auto largest = x.amax(-1).detach();
  const auto nothing = largest == -std::numeric_limits<double>::infinity();
  const auto below = x - largest.unsqueeze(-1);
  const auto is_held = held_targets(logits, own);
  const auto target = x.gather(-1, at::where(is_held, own, 0).unsqueeze(-1)).squeeze(-1);
  std::vector<Tensor> terms{largest, below.exp().sum(-1).masked_fill(nothing, 0),
                            target.masked_fill(is_held.logical_not(), 0)};
  if (with_sum) {
    terms.push_back(below.sum(-1).masked_fill(nothing, -std::numeric_limits<double>::infinity()));
  }
  return at::stack(terms);
}

Tensor composed_cross_entropy_gradient(const Tensor& logits, const Tensor& own,
                                       const Tensor& largest, const Tensor& log_sum,
                                       const Tensor& grad, double target, double shift) {
  const auto is_held = held_targets(logits, own);
  const auto at_targets = is_held.to(log_sum.scalar_type()) * target;
  const auto x = logits.to(log_sum.scalar_type()) - largest.unsqueeze(-1);
  const auto softmax = (x - log_sum.unsqueeze(-1)).exp();
  const auto sum =
      (softmax - shift)
          .scatter_add(-1, at::where(is_held, own, 0).unsqueeze(-1), at_targets.unsqueeze(-1));
  return (sum * grad.unsqueeze(-1)).to(logits.scalar_type());
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "_cross_entropy_terms(Tensor logits, Tensor own, bool with_sum) -> Tensor",
    "_cross_entropy_gradient(Tensor logits, Tensor own, Tensor largest, Tensor log_sum, "
    "Tensor grad, float target, float shift) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_cross_entropy_terms", torch_overlap::ops::composed_cross_entropy_terms);
  m.impl("_cross_entropy_gradient", torch_overlap::ops::composed_cross_entropy_gradient);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("_cross_entropy_terms", torch_overlap::ops::terms_meta);
  m.impl("_cross_entropy_gradient", torch_overlap::ops::gradient_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("_cross_entropy_terms", torch_overlap::ops::terms_autograd);
  m.impl("_cross_entropy_gradient", torch_overlap::ops::gradient_autograd);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("_cross_entropy_terms", torch_overlap::ops::composed_cross_entropy_terms);
  m.impl("_cross_entropy_gradient", torch_overlap::ops::composed_cross_entropy_gradient);
}
