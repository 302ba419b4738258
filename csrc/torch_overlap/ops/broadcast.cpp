#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// Allocates a contiguous tensor of x's shape, which is the same on all ranks. Serves both operators
// of this file.
Tensor rooted_out(std::string_view op, const Tensor& x, int64_t root) {
  TORCH_OVERLAP_CHECK(root >= 0, kValue, op, ": expected a rank >= 0 for root, got ", root,
                      ". Ranks do not count from the end.");
  return at::empty_symint(x.sym_sizes(), x.options());
}

// Broadcasts the root's x to every rank.
StartedOp start(const Tensor& x, int64_t root, std::string_view comm, bool async_op) {
  auto out = rooted_out("broadcast", x, root);
  const auto communicator = find_comm(comm);
  if (communicator->rank() == root) out.copy_(x);
  auto work = communicator->broadcast(out, static_cast<int>(root), async_op);
  return {std::move(out), std::move(work)};
}

Tensor broadcast_kernel(const Tensor& x, int64_t root, std::string_view comm) {
  return start(x, root, comm, /*async_op=*/false).out;
}

Tensor broadcast_meta(const Tensor& x, int64_t root, std::string_view) {
  return rooted_out("broadcast", x, root);
}

// Returns the sum of all ranks' x on the root, zeros elsewhere.
Tensor reduce_to_root_kernel(const Tensor& x, int64_t root, std::string_view comm) {
  auto out = rooted_out("reduce_to_root", x, root);
  const auto communicator = find_comm(comm);
  out.copy_(x);
  communicator->reduce(out, static_cast<int>(root), RedOpType::SUM, /*async_op=*/false);
  return communicator->rank() == root ? out : out.zero_();
}

Tensor reduce_to_root_meta(const Tensor& x, int64_t root, std::string_view) {
  return rooted_out("reduce_to_root", x, root);
}

// Broadcast and ReduceToRoot are the gradients of each other.
class Broadcast : public Function<Broadcast> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t root, std::string_view comm,
                        bool async_op) {
    ctx->saved_data["root"] = root;
    ctx->saved_data["comm"] = std::string(comm);
    const BelowAutograd guard;
    if (!async_op) return ops::broadcast(x, root, comm);
    return register_started("broadcast", x, start(materialized(x), root, comm, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::reduce_to_root(grads[0], ctx->saved_data["root"].toInt(),
                                ctx->saved_data["comm"].toStringRef()),
            {},
            {},
            {}};
  }
};

class ReduceToRoot : public Function<ReduceToRoot> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t root,
                        std::string_view comm) {
    ctx->saved_data["root"] = root;
    ctx->saved_data["comm"] = std::string(comm);
    const BelowAutograd guard;
    return ops::reduce_to_root(x, root, comm);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::broadcast(grads[0], ctx->saved_data["root"].toInt(),
                           ctx->saved_data["comm"].toStringRef()),
            {},
            {}};
  }
};

Tensor broadcast_autograd(const Tensor& x, int64_t root, std::string_view comm) {
  if (needs_autograd(x)) return Broadcast::apply(x, root, comm, false);
  const BelowAutograd guard;
  return ops::broadcast(x, root, comm);
}

Tensor reduce_to_root_autograd(const Tensor& x, int64_t root, std::string_view comm) {
  return ReduceToRoot::apply(x, root, comm);
}

Tensor broadcast_async(const Tensor& x, int64_t root, std::string_view comm) {
  if (!can_start_async(x)) return ops::broadcast(x, root, comm);
  if (needs_autograd(x)) return Broadcast::apply(x, root, comm, true);
  const BelowAutograd guard;
  return register_started("broadcast", x, start(materialized(x), root, comm, true));
}

}  // namespace

Tensor broadcast(const Tensor& x, int64_t root, std::string_view comm) {
  static const auto handle = find_op<decltype(broadcast_kernel)>("broadcast");
  return handle.call(x, root, comm);
}

Tensor reduce_to_root(const Tensor& x, int64_t root, std::string_view comm) {
  static const auto handle = find_op<decltype(reduce_to_root_kernel)>("_reduce_to_root");
  return handle.call(x, root, comm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def("broadcast(Tensor x, int root, str comm) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("broadcast_async(Tensor x, int root, str comm) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("_reduce_to_root(Tensor x, int root, str comm) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("broadcast", torch_overlap::ops::broadcast_kernel);
  m.impl("_reduce_to_root", torch_overlap::ops::reduce_to_root_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("broadcast", torch_overlap::ops::broadcast_meta);
  m.impl("_reduce_to_root", torch_overlap::ops::reduce_to_root_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("broadcast", torch_overlap::ops::broadcast_autograd);
  m.impl("_reduce_to_root", torch_overlap::ops::reduce_to_root_autograd);
}

TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("broadcast_async", torch_overlap::ops::broadcast_async);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("broadcast_async", torch_overlap::ops::broadcast_async);
}
