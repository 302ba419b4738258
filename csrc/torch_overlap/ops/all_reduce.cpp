#include <ATen/ops/empty.h>

#include "torch_overlap/ops/casts.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// Allocates the reduction of all ranks' x; same shape, contiguous.
Tensor all_reduce_out(const Tensor& x, std::string_view op, int64_t group_size,
                      std::string_view grad, const OptionalScalar& factor) {
  check_group_size("all_reduce", group_size);
  check_choice("all_reduce", "grad", "R I", grad);
  parse_reduction("all_reduce", x, op, factor);
  return at::empty_symint(x.sym_sizes(), x.options());
}

StartedOp start(const Tensor& x, std::string_view op, std::string_view comm, int64_t group_size,
                std::string_view grad, const OptionalScalar& factor, bool async_op) {
  auto out = all_reduce_out(x, op, group_size, grad, factor);
  const auto communicator = find_comm("all_reduce", comm, group_size);
  out.copy_(x);
  auto work = communicator->all_reduce(out, parse_reduction("all_reduce", x, op, factor), async_op);
  return {std::move(out), std::move(work)};
}

Tensor all_reduce_kernel(const Tensor& x, std::string_view op, std::string_view comm,
                         int64_t group_size, std::string_view grad, const OptionalScalar& factor) {
  return start(x, op, comm, group_size, grad, factor, /*async_op=*/false).out;
}

Tensor all_reduce_meta(const Tensor& x, std::string_view op, std::string_view, int64_t group_size,
                       std::string_view grad, const OptionalScalar& factor) {
  return all_reduce_out(x, op, group_size, grad, factor);
}

// P -> R: all_reduce of the gradients. P -> I: the gradients are already equal on all ranks, and
// become the replicated gradients of the terms, whose own gradients are summed.
class AllReduce : public Function<AllReduce> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, std::string_view op,
                        std::string_view comm, int64_t group_size, std::string_view grad,
                        const OptionalScalar& factor, bool async_op) {
    ctx->saved_data["op"] = std::string(op);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["grad"] = std::string(grad);
    ctx->saved_data["factor"] = IValue(factor);
    const BelowAutograd guard;
    if (!async_op) return ops::all_reduce(x, op, comm, group_size, grad, factor);
    return register_started("all_reduce", x,
                            start(materialized(x), op, comm, group_size, grad, factor, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const double scale = gradient_scale("all_reduce", ctx->saved_data["op"].toStringRef(),
                                        group_size, ctx->saved_data["factor"].toOptional<Scalar>());
    Tensor grad = grads[0];
    if (ctx->saved_data["grad"].toStringRef() == "R") {
      grad = ops::all_reduce(grad, "sum", ctx->saved_data["comm"].toStringRef(), group_size);
    } else {
      grad = invariant_to_replicated(grad, ctx->saved_data["comm"].toStringRef(), group_size);
    }
    if (scale != 1) grad = grad.mul(scale);
    return {grad, {}, {}, {}, {}, {}, {}};
  }
};

Tensor all_reduce_autograd(const Tensor& x, std::string_view op, std::string_view comm,
                           int64_t group_size, std::string_view grad,
                           const OptionalScalar& factor) {
  if (needs_autograd(x)) return AllReduce::apply(x, op, comm, group_size, grad, factor, false);
  const BelowAutograd guard;
  return ops::all_reduce(x, op, comm, group_size, grad, factor);
}

Tensor all_reduce_async(const Tensor& x, std::string_view op, std::string_view comm,
                        int64_t group_size, std::string_view grad, const OptionalScalar& factor) {
  if (!can_start_async(x)) return ops::all_reduce(x, op, comm, group_size, grad, factor);
  if (needs_autograd(x)) return AllReduce::apply(x, op, comm, group_size, grad, factor, true);
  const BelowAutograd guard;
  return register_started("all_reduce", x,
                          start(materialized(x), op, comm, group_size, grad, factor, true));
}

// In place. When traced, it is the functional operator and a copy, which a compiler decomposes and
// makes in place again.
Tensor& all_reduce_(Tensor& x, std::string_view op, std::string_view comm,
                    const OptionalScalar& factor) {
  const auto reduction = parse_reduction("all_reduce_", x, op, factor);
  TORCH_OVERLAP_CHECK(
      !needs_autograd(x), kUnsupported,
      "all_reduce_: expected a tensor that needs no gradient, got one that requires ",
      "it; use all_reduce, or torch.no_grad()");
  static const auto traced =
      find_op<Tensor(const Tensor&, std::string_view, std::string_view, const OptionalScalar&)>(
          "_all_reduce_traced");
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

Tensor all_reduce_traced_kernel(const Tensor& x, std::string_view op, std::string_view comm,
                                const OptionalScalar& factor) {
  return start(x, op, comm, find_comm(comm)->size(), "R", factor, /*async_op=*/false).out;
}

Tensor all_reduce_traced_meta(const Tensor& x, std::string_view op, std::string_view,
                              const OptionalScalar& factor) {
  return all_reduce_out(x, op, 1, "R", factor);
}

}  // namespace

Tensor all_reduce(const Tensor& x, std::string_view op, std::string_view comm, int64_t group_size,
                  std::string_view grad, const OptionalScalar& factor) {
  static const auto handle = find_op<decltype(all_reduce_kernel)>("all_reduce");
  return handle.call(x, op, comm, group_size, grad, factor);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "all_reduce(Tensor x, str op, str comm, int group_size, str grad=\"R\", Scalar? factor=None)"
      " -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "all_reduce_async(Tensor x, str op, str comm, int group_size, str grad=\"R\","
      " Scalar? factor=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("all_reduce_(Tensor(a!) x, str op, str comm, Scalar? factor=None) -> Tensor(a!)",
        {at::Tag::pt2_compliant_tag});
  m.def("_all_reduce_traced(Tensor x, str op, str comm, Scalar? factor=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_reduce", torch_overlap::ops::all_reduce_kernel);
  m.impl("_all_reduce_traced", torch_overlap::ops::all_reduce_traced_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("all_reduce", torch_overlap::ops::all_reduce_meta);
  m.impl("_all_reduce_traced", torch_overlap::ops::all_reduce_traced_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_reduce", torch_overlap::ops::all_reduce_autograd);
}

TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("all_reduce_async", torch_overlap::ops::all_reduce_async);
  m.impl("all_reduce_", torch_overlap::ops::all_reduce_);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("all_reduce_async", torch_overlap::ops::all_reduce_async);
  m.impl("all_reduce_", torch_overlap::ops::all_reduce_);
}
