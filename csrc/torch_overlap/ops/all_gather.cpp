#include <ATen/ops/empty.h>

#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct AllGather {
  using Result = Tensor;
  static constexpr const char* kName = "all_gather";
  Tensor x;
  int64_t dim;
  std::string_view comm;
  int64_t group_size;
  std::string_view grad = "R";
  TORCH_OVERLAP_FIELDS(x, dim, comm, group_size, grad);

  int64_t wrapped_dim() const { return wrap_dim(kName, x, dim, "dim"); }

  // Allocates the concatenation of every rank's x along `dim`, in rank order; contiguous.
  Tensor allocate() const {
    check_group_size(kName, group_size);
    check_choice(kName, "grad", "R I", grad);
    auto sizes = x.sym_sizes().vec();
    sizes[wrapped_dim()] *= group_size;
    return at::empty_symint(sizes, x.options());
  }

  StartedOp start(bool async_op) const {
    if (async_op) return start_in_background();
    return {gather(), nullptr};
  }

  // Gathers along the outermost dimension without a copy. Along another dimension the ranks' parts
  // arrive side by side, and one copy puts them in order.
  Tensor gather() const {
    auto out = allocate();
    const auto communicator = find_comm(kName, comm, group_size);
    const auto mine = x.contiguous();
    const int64_t at = wrapped_dim();
    if (is_outermost(x, at)) {
      communicator->all_gather_single(out, mine, /*async_op=*/false);
      return out;
    }
    auto parts_sizes = x.sizes().vec();
    parts_sizes.insert(parts_sizes.begin(), group_size);
    const auto parts = at::empty(parts_sizes, x.options());
    communicator->all_gather_single(parts, mine, /*async_op=*/false);
    out.unflatten(at, {group_size, x.size(at)}).copy_(parts.movedim(0, at));
    return out;
  }

  // Nothing can be copied after an asynchronous gather, so x is copied into order before it, and
  // the result is a transposed view of the received data.
  StartedOp start_in_background() const {
    check_choice(kName, "grad", "R I", grad);
    check_group_size(kName, group_size);
    const int64_t at = wrapped_dim();
    const auto communicator = find_comm(kName, comm, group_size);
    const auto mine = clone_if_unversioned(dim_first(x, at), x);
    auto sizes = mine.sizes().vec();
    sizes[0] *= group_size;
    const auto gathered = at::empty(sizes, x.options());
    auto work = communicator->all_gather_single(gathered, mine, /*async_op=*/true);
    return {at == 0 ? gathered : gathered.movedim(0, at), std::move(work)};
  }

  // S -> R: reduce_scatter of the gradients. S -> I: every rank keeps its own part of the gradient.
  static void backward(Backward<AllGather>& pass) {
    const auto& [x, dim, comm, group_size, grad] = pass.call;
    pass.set(x, grad == "R" ? ops::reduce_scatter(pass.grads[0], dim, "sum", comm, group_size)
                            : ops::own_part(pass.grads[0], dim, comm, group_size));
  }
};

// This rank's part: I -> S. Its gradient is the invariant all_gather.
struct OwnPart {
  using Result = Tensor;
  static constexpr const char* kName = "_own_part";
  Tensor x;
  int64_t dim;
  std::string_view comm;
  int64_t group_size;
  TORCH_OVERLAP_FIELDS(x, dim, comm, group_size);

  int64_t wrapped_dim() const { return wrap_dim("own_part", x, dim, "dim"); }

  Tensor allocate() const {
    check_group_size("own_part", group_size);
    const int64_t at = wrapped_dim();
    check_divisible("own_part", x, at, group_size);
    auto sizes = x.sym_sizes().vec();
    sizes[at] = sizes[at] / group_size;
    return at::empty_symint(sizes, x.options());
  }

  StartedOp start(bool /*async_op*/) const {
    auto out = allocate();
    const int rank = find_comm("own_part", comm, group_size)->rank();
    const int64_t at = wrapped_dim();
    out.copy_(x.narrow(at, rank * out.size(at), out.size(at)));
    return {std::move(out), nullptr};
  }

  static void backward(Backward<OwnPart>& pass) {
    const auto& [x, dim, comm, group_size] = pass.call;
    pass.set(x, ops::all_gather(pass.grads[0], dim, comm, group_size, "I"));
  }
};

TORCH_OVERLAP_COLLECTIVE(AllGather)
TORCH_OVERLAP_ASYNC("all_gather_async", AllGather)
TORCH_OVERLAP_COLLECTIVE(OwnPart)

}  // namespace

Tensor all_gather(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size,
                  std::string_view grad) {
  return Operator<AllGather>::dispatch({x, dim, comm, group_size, grad});
}

Tensor own_part(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size) {
  return Operator<OwnPart>::dispatch({x, dim, comm, group_size});
}

}  // namespace torch_overlap::ops
