#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kReduceScatter = "reduce_scatter";

// Allocates this rank's part, along `dim`, of the reduction of all ranks' x; contiguous.
Tensor reduce_scatter_out(const Tensor& x, int64_t dim, std::string_view op, int64_t group_size,
                          const OptionalScalar& factor) {
  check_group_size(kReduceScatter, group_size);
  parse_reduction(kReduceScatter, x, op, factor);
  dim = wrap_dim(kReduceScatter, x, dim, "dim");
  check_divisible(kReduceScatter, x, dim, group_size);
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / group_size;
  return at::empty_symint(sizes, x.options());
}

// Scattering along dimension 0 needs no copy; along another dimension, one before the collective.
StartedOp start(const Tensor& x, int64_t dim, std::string_view op, std::string_view comm,
                int64_t group_size, const OptionalScalar& factor, bool async_op) {
  auto out = reduce_scatter_out(x, dim, op, group_size, factor);
  const auto communicator = find_comm(kReduceScatter, comm, group_size);
  dim = wrap_dim(kReduceScatter, x, dim, "dim");
  auto parts = dim == 0
                   ? x.contiguous()
                   : x.unflatten(dim, {group_size, out.size(dim)}).movedim(dim, 0).contiguous();
  if (async_op) parts = clone_if_unversioned(parts, x);
  auto work = communicator->reduce_scatter_single(
      out, parts, parse_reduction(kReduceScatter, x, op, factor), async_op);
  return {std::move(out), std::move(work)};
}

Tensor reduce_scatter_kernel(const Tensor& x, int64_t dim, std::string_view op,
                             std::string_view comm, int64_t group_size,
                             const OptionalScalar& factor) {
  return start(x, dim, op, comm, group_size, factor, /*async_op=*/false).out;
}

Tensor reduce_scatter_meta(const Tensor& x, int64_t dim, std::string_view op, std::string_view,
                           int64_t group_size, const OptionalScalar& factor) {
  return reduce_scatter_out(x, dim, op, group_size, factor);
}

// P -> S: all_gather of the gradients.
class ReduceScatter : public Function<ReduceScatter> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, std::string_view op,
                        std::string_view comm, int64_t group_size, const OptionalScalar& factor,
                        bool async_op) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["op"] = std::string(op);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["factor"] = IValue(factor);
    const BelowAutograd guard;
    if (!async_op) return ops::reduce_scatter(x, dim, op, comm, group_size, factor);
    return register_started(kReduceScatter, x,
                            start(materialized(x), dim, op, comm, group_size, factor, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const double scale = gradient_scale(kReduceScatter, ctx->saved_data["op"].toStringRef(),
                                        group_size, ctx->saved_data["factor"].toOptional<Scalar>());
    auto grad = ops::all_gather(grads[0], ctx->saved_data["dim"].toInt(),
                                ctx->saved_data["comm"].toStringRef(), group_size);
    if (scale != 1) grad = grad.mul(scale);
    return {grad, {}, {}, {}, {}, {}, {}};
  }
};

Tensor reduce_scatter_autograd(const Tensor& x, int64_t dim, std::string_view op,
                               std::string_view comm, int64_t group_size,
                               const OptionalScalar& factor) {
  if (needs_autograd(x)) return ReduceScatter::apply(x, dim, op, comm, group_size, factor, false);
  const BelowAutograd guard;
  return ops::reduce_scatter(x, dim, op, comm, group_size, factor);
}

Tensor reduce_scatter_async(const Tensor& x, int64_t dim, std::string_view op,
                            std::string_view comm, int64_t group_size,
                            const OptionalScalar& factor) {
  if (!can_start_async(x)) return ops::reduce_scatter(x, dim, op, comm, group_size, factor);
  if (needs_autograd(x)) return ReduceScatter::apply(x, dim, op, comm, group_size, factor, true);
  const BelowAutograd guard;
  return register_started(kReduceScatter, x,
                          start(materialized(x), dim, op, comm, group_size, factor, true));
}

}  // namespace

Tensor reduce_scatter(const Tensor& x, int64_t dim, std::string_view op, std::string_view comm,
                      int64_t group_size, const OptionalScalar& factor) {
  static const auto handle = find_op<decltype(reduce_scatter_kernel)>("reduce_scatter");
  return handle.call(x, dim, op, comm, group_size, factor);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "reduce_scatter(Tensor x, int dim, str op, str comm, int group_size, Scalar? factor=None)"
      " -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "reduce_scatter_async(Tensor x, int dim, str op, str comm, int group_size,"
      " Scalar? factor=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("reduce_scatter", torch_overlap::ops::reduce_scatter_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("reduce_scatter", torch_overlap::ops::reduce_scatter_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("reduce_scatter", torch_overlap::ops::reduce_scatter_autograd);
}

TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("reduce_scatter_async", torch_overlap::ops::reduce_scatter_async);
}

TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) {
  m.impl("reduce_scatter_async", torch_overlap::ops::reduce_scatter_async);
}
