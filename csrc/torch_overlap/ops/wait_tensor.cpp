#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// Functional form of wait_tensor for tracing: the result is copied into x. It waits on the memory
// of x itself, so x must not be copied before: an operator that modifies x would get a copy, which
// no work writes.
Tensor waited_kernel(const Tensor& x) {
  if (!x.is_meta()) wait_for_work(x);
  auto out = at::empty_symint(x.sym_sizes(), x.options());
  if (!x.is_meta()) out.copy_(x);
  return out;
}

// wait_tensor is invisible to autograd: its gradient is x's gradient.
Tensor wait_composite(const Tensor& x) {
  if (can_start_async(x)) {
    wait_for_work(x);
    return x;
  }
  static const auto functional = find_op<Tensor(const Tensor&)>("_waited");
  const BelowAutograd guard;
  x.copy_(functional.call(x));
  return x;
}

}  // namespace

Tensor wait_tensor(const Tensor& x) {
  static const auto handle = find_op<Tensor(const Tensor&)>("wait_tensor");
  return handle.call(x);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS("wait_tensor(Tensor(a!) x) -> Tensor(a!)", "_waited(Tensor x) -> Tensor")

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def("_pending_works() -> int", torch_overlap::ops::pending_works);
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_waited", torch_overlap::ops::waited_kernel);
}

TORCH_OVERLAP_COMPOSITE("wait_tensor", torch_overlap::ops::wait_composite)
