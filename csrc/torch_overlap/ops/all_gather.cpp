#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllGather = "all_gather";

// Allocates the concatenation of every rank's x along `dim`, in rank order; contiguous.
Tensor all_gather_out(const Tensor& x, int64_t dim, int64_t group_size, std::string_view grad) {
  check_group_size(kAllGather, group_size);
  check_choice(kAllGather, "grad", "R I", grad);
  auto sizes = x.sym_sizes().vec();
  sizes[wrap_dim(kAllGather, x, dim, "dim")] *= group_size;
  return at::empty_symint(sizes, x.options());
}

// Gathers along the outermost dimension without a copy. Along another dimension the ranks' parts
// arrive side by side, and one copy puts them in order.
Tensor all_gather_kernel(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size,
                         std::string_view grad) {
  auto out = all_gather_out(x, dim, group_size, grad);
  const auto communicator = find_comm(kAllGather, comm, group_size);
  const auto mine = x.contiguous();
  dim = wrap_dim(kAllGather, x, dim, "dim");
  if (is_outermost(x, dim)) {
    communicator->all_gather_single(out, mine, /*async_op=*/false);
    return out;
  }
  auto parts_sizes = x.sizes().vec();
  parts_sizes.insert(parts_sizes.begin(), group_size);
  const auto parts = at::empty(parts_sizes, x.options());
  communicator->all_gather_single(parts, mine, /*async_op=*/false);
  out.unflatten(dim, {group_size, x.size(dim)}).copy_(parts.movedim(0, dim));
  return out;
}

// Nothing can be copied after an asynchronous gather, so x is copied into order before it, and the
// result is a transposed view of the received data.
StartedOp start(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size) {
  check_group_size(kAllGather, group_size);
  dim = wrap_dim(kAllGather, x, dim, "dim");
  const auto communicator = find_comm(kAllGather, comm, group_size);
  const auto mine = clone_if_unversioned(dim_first(x, dim), x);
  auto sizes = mine.sizes().vec();
  sizes[0] *= group_size;
  const auto gathered = at::empty(sizes, x.options());
  auto work = communicator->all_gather_single(gathered, mine, /*async_op=*/true);
  return {dim == 0 ? gathered : gathered.movedim(0, dim), std::move(work)};
}

Tensor all_gather_meta(const Tensor& x, int64_t dim, std::string_view, int64_t group_size,
                       std::string_view grad) {
  return all_gather_out(x, dim, group_size, grad);
}

// S -> R: reduce_scatter of the gradients. S -> I: every rank keeps its own part of the gradient.
class AllGather : public Function<AllGather> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, std::string_view comm,
                        int64_t group_size, std::string_view grad, bool async_op) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["grad"] = std::string(grad);
    const BelowAutograd guard;
    if (!async_op) return ops::all_gather(x, dim, comm, group_size, grad);
    check_choice(kAllGather, "grad", "R I", grad);
    return register_started(kAllGather, x, start(materialized(x), dim, comm, group_size));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const bool replicated = ctx->saved_data["grad"].toStringRef() == "R";
    const auto grad = replicated ? ops::reduce_scatter(grads[0], dim, "sum", comm, group_size)
                                 : ops::own_part(grads[0], dim, comm, group_size);
    return {grad, {}, {}, {}, {}, {}};
  }
};

Tensor all_gather_autograd(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size,
                           std::string_view grad) {
  if (needs_autograd(x)) return AllGather::apply(x, dim, comm, group_size, grad, false);
  const BelowAutograd guard;
  return ops::all_gather(x, dim, comm, group_size, grad);
}

Tensor all_gather_async(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size,
                        std::string_view grad) {
  if (!can_start_async(x)) return ops::all_gather(x, dim, comm, group_size, grad);
  if (needs_autograd(x)) return AllGather::apply(x, dim, comm, group_size, grad, true);
  const BelowAutograd guard;
  check_choice(kAllGather, "grad", "R I", grad);
  return register_started(kAllGather, x, start(materialized(x), dim, comm, group_size));
}

// Returns this rank's part: I -> S. Its gradient is the invariant all_gather.

Tensor own_part_out(const Tensor& x, int64_t dim, int64_t group_size) {
  check_group_size("own_part", group_size);
  dim = wrap_dim("own_part", x, dim, "dim");
  check_divisible("own_part", x, dim, group_size);
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / group_size;
  return at::empty_symint(sizes, x.options());
}

Tensor own_part_kernel(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size) {
  auto out = own_part_out(x, dim, group_size);
  const int rank = find_comm("own_part", comm, group_size)->rank();
  dim = wrap_dim("own_part", x, dim, "dim");
  return out.copy_(x.narrow(dim, rank * out.size(dim), out.size(dim)));
}

Tensor own_part_meta(const Tensor& x, int64_t dim, std::string_view, int64_t group_size) {
  return own_part_out(x, dim, group_size);
}

class OwnPart : public Function<OwnPart> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, std::string_view comm,
                        int64_t group_size) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    const BelowAutograd guard;
    return ops::own_part(x, dim, comm, group_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::all_gather(grads[0], ctx->saved_data["dim"].toInt(),
                            ctx->saved_data["comm"].toStringRef(),
                            ctx->saved_data["group_size"].toInt(), "I"),
            {},
            {},
            {}};
  }
};

Tensor own_part_autograd(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size) {
  return OwnPart::apply(x, dim, comm, group_size);
}

}  // namespace

Tensor all_gather(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size,
                  std::string_view grad) {
  static const auto handle = find_op<decltype(all_gather_kernel)>("all_gather");
  return handle.call(x, dim, comm, group_size, grad);
}

Tensor own_part(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size) {
  static const auto handle = find_op<decltype(own_part_kernel)>("_own_part");
  return handle.call(x, dim, comm, group_size);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def("all_gather(Tensor x, int dim, str comm, int group_size, str grad=\"R\") -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("all_gather_async(Tensor x, int dim, str comm, int group_size, str grad=\"R\") -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("_own_part(Tensor x, int dim, str comm, int group_size) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_gather", torch_overlap::ops::all_gather_kernel);
  m.impl("_own_part", torch_overlap::ops::own_part_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("all_gather", torch_overlap::ops::all_gather_meta);
  m.impl("_own_part", torch_overlap::ops::own_part_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_gather", torch_overlap::ops::all_gather_autograd);
  m.impl("_own_part", torch_overlap::ops::own_part_autograd);
}

TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("all_gather_async", torch_overlap::ops::all_gather_async);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("all_gather_async", torch_overlap::ops::all_gather_async);
}
