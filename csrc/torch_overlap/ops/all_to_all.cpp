#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllToAll = "all_to_all";

struct Dims {
  int64_t split;
  int64_t concat;
};

Dims wrap_dims(const Tensor& x, int64_t split_dim, int64_t concat_dim) {
  return {wrap_dim(kAllToAll, x, split_dim, "split_dim"),
          wrap_dim(kAllToAll, x, concat_dim, "concat_dim")};
}

// Allocates the result of sending part r of x along split_dim to rank r: the concatenation of the
// received parts along concat_dim, in rank order; contiguous.
Tensor all_to_all_out(const Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t group_size) {
  check_group_size(kAllToAll, group_size);
  const auto dims = wrap_dims(x, split_dim, concat_dim);
  check_divisible(kAllToAll, x, dims.split, group_size);
  auto sizes = x.sym_sizes().vec();
  sizes[dims.split] = sizes[dims.split] / group_size;
  sizes[dims.concat] = sizes[dims.concat] * group_size;
  return at::empty_symint(sizes, x.options());
}

// Parts are sent with concat_dim first, so that the received parts form the result up to the order
// of its dimensions. If both dims are 0, nothing is copied.
StartedOp start(const Tensor& x, int64_t split_dim, int64_t concat_dim, std::string_view comm,
                int64_t group_size, bool async_op) {
  check_group_size(kAllToAll, group_size);
  const auto dims = wrap_dims(x, split_dim, concat_dim);
  check_divisible(kAllToAll, x, dims.split, group_size);
  const auto communicator = find_comm(kAllToAll, comm, group_size);
  const int64_t part = x.size(dims.split) / group_size;
  auto parts = x.unflatten(dims.split, {group_size, part})
                   .movedim(dims.split, 0)
                   .movedim(dims.concat + 1, 1)
                   .contiguous();
  if (async_op) parts = clone_if_unversioned(parts, x);
  const auto received = at::empty(parts.sizes(), parts.options());
  auto work = communicator->all_to_all_single(received, parts, async_op);
  return {received.flatten(0, 1).movedim(0, dims.concat), std::move(work)};
}

Tensor all_to_all_kernel(const Tensor& x, int64_t split_dim, int64_t concat_dim,
                         std::string_view comm, int64_t group_size) {
  return start(x, split_dim, concat_dim, comm, group_size, /*async_op=*/false).out.contiguous();
}

Tensor all_to_all_meta(const Tensor& x, int64_t split_dim, int64_t concat_dim, std::string_view,
                       int64_t group_size) {
  return all_to_all_out(x, split_dim, concat_dim, group_size);
}

// S(i) -> S(j): the gradient is exchanged in the opposite direction.
class AllToAll : public Function<AllToAll> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t split_dim,
                        int64_t concat_dim, std::string_view comm, int64_t group_size,
                        bool async_op) {
    ctx->saved_data["split_dim"] = split_dim;
    ctx->saved_data["concat_dim"] = concat_dim;
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    const BelowAutograd guard;
    if (!async_op) return ops::all_to_all(x, split_dim, concat_dim, comm, group_size);
    return register_started(kAllToAll, x,
                            start(materialized(x), split_dim, concat_dim, comm, group_size, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {
        ops::all_to_all(grads[0], ctx->saved_data["concat_dim"].toInt(),
                        ctx->saved_data["split_dim"].toInt(), ctx->saved_data["comm"].toStringRef(),
                        ctx->saved_data["group_size"].toInt()),
        {},
        {},
        {},
        {},
        {}};
  }
};

Tensor all_to_all_autograd(const Tensor& x, int64_t split_dim, int64_t concat_dim,
                           std::string_view comm, int64_t group_size) {
  if (needs_autograd(x)) return AllToAll::apply(x, split_dim, concat_dim, comm, group_size, false);
  const BelowAutograd guard;
  return ops::all_to_all(x, split_dim, concat_dim, comm, group_size);
}

Tensor all_to_all_async(const Tensor& x, int64_t split_dim, int64_t concat_dim,
                        std::string_view comm, int64_t group_size) {
  if (!can_start_async(x)) return ops::all_to_all(x, split_dim, concat_dim, comm, group_size);
  if (needs_autograd(x)) return AllToAll::apply(x, split_dim, concat_dim, comm, group_size, true);
  const BelowAutograd guard;
  return register_started(kAllToAll, x,
                          start(materialized(x), split_dim, concat_dim, comm, group_size, true));
}

}  // namespace

Tensor all_to_all(const Tensor& x, int64_t split_dim, int64_t concat_dim, std::string_view comm,
                  int64_t group_size) {
  static const auto handle = find_op<decltype(all_to_all_kernel)>("all_to_all");
  return handle.call(x, split_dim, concat_dim, comm, group_size);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def("all_to_all(Tensor x, int split_dim, int concat_dim, str comm, int group_size) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "all_to_all_async(Tensor x, int split_dim, int concat_dim, str comm, int group_size)"
      " -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_to_all", torch_overlap::ops::all_to_all_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) { m.impl("all_to_all", torch_overlap::ops::all_to_all_meta); }

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_to_all", torch_overlap::ops::all_to_all_autograd);
}

TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("all_to_all_async", torch_overlap::ops::all_to_all_async);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("all_to_all_async", torch_overlap::ops::all_to_all_async);
}
