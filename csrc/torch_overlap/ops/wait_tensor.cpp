#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// `_wait_` changes what the memory of x holds, and returns nothing: that is what a compiler must
// know to keep it before every reader of x. wait_tensor is that, and x again; its gradient is x's.
void wait_kernel(const Tensor& x) { wait_for_work(x); }

void wait_meta(const Tensor&) {}

void wait_autograd(const Tensor& x) {
  static const auto handle = find_op<void(const Tensor&)>("_wait_");
  const BelowAutograd guard;
  handle.call(x);
}

Tensor wait_composite(const Tensor& x) {
  static const auto handle = find_op<void(const Tensor&)>("_wait_");
  handle.call(x);
  return x;
}

}  // namespace

Tensor wait_tensor(const Tensor& x) {
  static const auto handle = find_op<Tensor(const Tensor&)>("wait_tensor");
  return handle.call(x);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def("wait_tensor(Tensor(a!) x) -> Tensor(a!)", {at::Tag::pt2_compliant_tag});
  m.def("_wait_(Tensor(a!) x) -> ()", {at::Tag::pt2_compliant_tag});
  m.def("_pending_works() -> int", torch_overlap::ops::pending_works);
}

TORCH_LIBRARY_IMPL(torch_overlap, CompositeExplicitAutograd, m) {
  m.impl("_wait_", torch_overlap::ops::wait_kernel);
}

TORCH_LIBRARY_IMPL(torch_overlap, Meta, m) { m.impl("_wait_", torch_overlap::ops::wait_meta); }

TORCH_LIBRARY_IMPL(torch_overlap, Autograd, m) {
  m.impl("_wait_", torch_overlap::ops::wait_autograd);
}

TORCH_LIBRARY_IMPL(torch_overlap, CompositeImplicitAutograd, m) {
  m.impl("wait_tensor", torch_overlap::ops::wait_composite);
}

TORCH_LIBRARY_IMPL(torch_overlap, FuncTorchBatchedDecomposition, m) {
  m.impl("wait_tensor", torch_overlap::ops::wait_composite);
}
