#include <ATen/ops/empty.h>

#include "torch_overlap/ops/casts.h"
#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct AllReduce {
  using Result = Tensor;
  static constexpr const char* kName = "all_reduce";
  Tensor x;
  std::string_view op;
  std::string_view comm;
  int64_t group_size;
  std::string_view grad = "R";
  OptionalScalar factor{};
  TORCH_OVERLAP_FIELDS(x, op, comm, group_size, grad, factor);

  // Allocates the reduction of all ranks' x; same shape, contiguous.
  Tensor allocate() const {
    check_group_size(kName, group_size);
    check_choice(kName, "grad", "R I", grad);
    parse_reduction(kName, x, op, factor);
    return at::empty_symint(x.sym_sizes(), x.options());
  }

  StartedOp start(bool async_op) const {
    auto out = allocate();
    const auto communicator = find_comm(kName, comm, group_size);
    out.copy_(x);
    auto work = communicator->all_reduce(out, parse_reduction(kName, x, op, factor), async_op);
    return {std::move(out), std::move(work)};
  }

  // P -> R: all_reduce of the gradients. P -> I: the gradients are already equal on all ranks, and
  // become the replicated gradients of the terms, whose own gradients are summed.
  static void backward(Backward<AllReduce>& pass) {
    const AllReduce& call = pass.call;
    const double scale = gradient_scale(kName, call.op, call.group_size, call.factor);
    Tensor grad = call.grad == "R"
                      ? ops::all_reduce(pass.grads[0], "sum", call.comm, call.group_size)
                      : invariant_to_replicated(pass.grads[0], call.comm, call.group_size);
    if (scale != 1) grad = grad.mul(scale);
    pass.set(call.x, std::move(grad));
  }
};

// In place. When traced, it is the functional operator and a copy, which a compiler decomposes and
// makes in place again.
Tensor& all_reduce_(Tensor& x, std::string_view op, std::string_view comm,
                    const OptionalScalar& factor) {
  const auto reduction = parse_reduction("all_reduce_", x, op, factor);
  TORCH_OVERLAP_CHECK(
      !needs_autograd(x), kUnsupported,
      "all_reduce_: expected a tensor that needs no gradient, got one that requires ",
      "it; use all_reduce, or torch.no_grad()");
  using Traced = Tensor(const Tensor&, std::string_view, std::string_view, const OptionalScalar&);
  static const auto traced = find_op<Traced>("_all_reduce_traced");
  if (!can_start_async(x)) return x.copy_(traced.call(x, op, comm, factor));
  check_no_overlap("all_reduce_", x);
  const auto communicator = find_comm(comm);
  const BelowAutograd guard;
  if (x.is_contiguous() && !x.is_conj() && !x.is_neg()) {
    communicator->all_reduce(x, reduction, /*async_op=*/false);
  } else {
    auto dense = at::empty(x.sizes(), x.options());
    dense.copy_(x);
    communicator->all_reduce(dense, reduction, /*async_op=*/false);
    x.copy_(dense);
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();  // the copy is below autograd
  }
  return x;
}

Tensor all_reduce_traced(const Tensor& x, std::string_view op, std::string_view comm,
                         const OptionalScalar& factor) {
  const int64_t size = x.is_meta() ? 1 : find_comm(comm)->size();
  return collective_kernel(AllReduce{x, op, comm, size, "R", factor});
}

TORCH_OVERLAP_COLLECTIVE(AllReduce)
TORCH_OVERLAP_ASYNC("all_reduce_async", AllReduce)
TORCH_OVERLAP_COMPOSITE("all_reduce_", all_reduce_)
TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_all_reduce_traced", all_reduce_traced);
}

}  // namespace

Tensor all_reduce(const Tensor& x, std::string_view op, std::string_view comm, int64_t group_size,
                  std::string_view grad, const OptionalScalar& factor) {
  return Operator<AllReduce>::dispatch({x, op, comm, group_size, grad, factor});
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "all_reduce_(Tensor(a!) x, str op, str comm, Scalar? factor=None) -> Tensor(a!)",
    "_all_reduce_traced(Tensor x, str op, str comm, Scalar? factor=None) -> Tensor")
