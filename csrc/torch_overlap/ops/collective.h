#pragma once

#include "torch_overlap/ops/autograd.h"

// A collective of one tensor: an operator that operator.h describes, whose first field is
// `Tensor x`, with a form `<name>_async`. It adds:
//
//   Tensor allocate() const;                            // checks the call; allocates its result
//   StartedOp start(bool async_op) const;
//   static void backward(Backward<Op>& pass);
namespace torch_overlap::ops {

template <typename Op>
Tensor collective_kernel(const Op& call) {
  return call.x.is_meta() ? call.allocate() : call.start(/*async_op=*/false).out;
}

template <typename Op>
Tensor start_async(const Op& call) {
  Op plain = call;
  plain.x = materialized(call.x);
  return register_started(Op::kName, call.x, plain.start(/*async_op=*/true));
}

// The kernel of the `_async` form.
template <typename Op>
Tensor async_kernel(const Op& call) {
  if (!can_start_async(call.x)) return Operator<Op>::dispatch(call);
  if (needs_autograd(call.x)) {
    return OpFunction<Op, start_async<Op>>::apply(at::TensorList(call.x), call)[0];
  }
  const BelowAutograd guard;
  return start_async(call);
}

template <typename Op>
constexpr auto kAsyncKernel = &Operator<Op>::template unpacked<async_kernel<Op>>;

// Defines the operator and its gradient.
#define TORCH_OVERLAP_COLLECTIVE(Op)                \
  TORCH_OVERLAP_OPERATOR(Op, collective_kernel<Op>) \
  TORCH_OVERLAP_AUTOGRAD(Op, autograd_kernel<Op>)
// Defines the `_async` form `name`, which is composed of other operators.
#define TORCH_OVERLAP_ASYNC(name, Op)        \
  TORCH_OVERLAP_SCHEMAS(schema_of<Op>(name)) \
  TORCH_OVERLAP_COMPOSITE(name, kAsyncKernel<Op>)

}  // namespace torch_overlap::ops
