#pragma once

#include "torch_overlap/ops/autograd.h"

// Operators of one rank's tensors that have kernels of their own, and a composition of torch's
// operators that gives the same. The composition serves devices and dtypes without a kernel, vmap,
// and gradients that the kernels do not have.
namespace torch_overlap::ops {

template <const char* kName, auto kComposed>
struct Composed;
template <const char* kName, typename Result, typename... Args, Result (*kComposed)(Args...)>
struct Composed<kName, kComposed> {
  static Result call(Args... args) {
    static const auto op = find_op<Result(Args...)>(kName);
    return op.call(args...);
  }
  static Result call_below_autograd(Args... args) {
    const BelowAutograd guard;
    return call(args...);
  }
  // For an operator whose gradient is that of its composition.
  static Result autograd(Args... args) {
    return (needs_autograd(args) || ...) ? kComposed(args...) : call_below_autograd(args...);
  }
};

}  // namespace torch_overlap::ops

// Registers the composition, the Meta kernel and the gradient of an operator.
#define TORCH_OVERLAP_COMPOSED(name, composed, meta, autograd)                        \
  TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) { m.impl(name, composed); }     \
  TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) { m.impl(name, composed); } \
  TORCH_OVERLAP_KERNELS(Meta, m) { m.impl(name, meta); }                              \
  TORCH_OVERLAP_KERNELS(Autograd, m) { m.impl(name, autograd); }
