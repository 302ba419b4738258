#include <ATen/ops/empty.h>

#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct ReduceScatter {
  using Result = Tensor;
  static constexpr const char* kName = "reduce_scatter";
  Tensor x;
  int64_t dim;
  std::string_view op;
  std::string_view comm;
  int64_t group_size;
  OptionalScalar factor{};
  TORCH_OVERLAP_FIELDS(x, dim, op, comm, group_size, factor);

  int64_t wrapped_dim() const { return wrap_dim(kName, x, dim, "dim"); }

  // Allocates this rank's part, along `dim`, of the reduction of all ranks' x; contiguous.
  Tensor allocate() const {
    check_group_size(kName, group_size);
    parse_reduction(kName, x, op, factor);
    const int64_t at = wrapped_dim();
    check_divisible(kName, x, at, group_size);
    auto sizes = x.sym_sizes().vec();
    sizes[at] = sizes[at] / group_size;
    return at::empty_symint(sizes, x.options());
  }

  // Scattering along dimension 0 needs no copy; along another dimension, one before the collective.
  StartedOp start(bool async_op) const {
    auto out = allocate();
    const auto communicator = find_comm(kName, comm, group_size);
    const int64_t at = wrapped_dim();
    auto parts = at == 0 ? x.contiguous()
                         : x.unflatten(at, {group_size, out.size(at)}).movedim(at, 0).contiguous();
    if (async_op) parts = clone_if_unversioned(parts, x);
    auto work = communicator->reduce_scatter_single(
        out, parts, parse_reduction(kName, x, op, factor), async_op);
    return {std::move(out), std::move(work)};
  }

  // P -> S: all_gather of the gradients.
  static void backward(Backward<ReduceScatter>& pass) {
    const ReduceScatter& call = pass.call;
    const double scale = gradient_scale(kName, call.op, call.group_size, call.factor);
    auto grad = ops::all_gather(pass.grads[0], call.dim, call.comm, call.group_size);
    if (scale != 1) grad = grad.mul(scale);
    pass.set(call.x, std::move(grad));
  }
};

TORCH_OVERLAP_COLLECTIVE(ReduceScatter)
TORCH_OVERLAP_ASYNC("reduce_scatter_async", ReduceScatter)

}  // namespace

Tensor reduce_scatter(const Tensor& x, int64_t dim, std::string_view op, std::string_view comm,
                      int64_t group_size, const OptionalScalar& factor) {
  return Operator<ReduceScatter>::dispatch({x, dim, op, comm, group_size, factor});
}

}  // namespace torch_overlap::ops
