#include "torch_overlap/ops/cross_entropy.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <limits>

#include "torch_overlap/ops/composed.h"

namespace torch_overlap::ops {
namespace {

constexpr char kTerms[] = "_cross_entropy_terms";
constexpr char kGradient[] = "_cross_entropy_gradient";

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

TORCH_OVERLAP_SCHEMAS(
    "_cross_entropy_terms(Tensor logits, Tensor own, bool with_sum) -> Tensor",
    "_cross_entropy_gradient(Tensor logits, Tensor own, Tensor largest, Tensor log_sum, "
    "Tensor grad, float target, float shift) -> Tensor")

using CrossEntropyTermsOp = Composed<kTerms, composed_cross_entropy_terms>;
using CrossEntropyGradientOp = Composed<kGradient, composed_cross_entropy_gradient>;
TORCH_OVERLAP_COMPOSED(kTerms, composed_cross_entropy_terms, terms_meta,
                       CrossEntropyTermsOp::autograd)
TORCH_OVERLAP_COMPOSED(kGradient, composed_cross_entropy_gradient, gradient_meta,
                       CrossEntropyGradientOp::autograd)

}  // namespace torch_overlap::ops
