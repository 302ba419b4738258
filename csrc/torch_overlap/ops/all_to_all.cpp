#include <ATen/ops/empty.h>

#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct AllToAll {
  using Result = Tensor;
  static constexpr const char* kName = "all_to_all";
  Tensor x;
  int64_t split_dim;
  int64_t concat_dim;
  std::string_view comm;
  int64_t group_size;
  TORCH_OVERLAP_FIELDS(x, split_dim, concat_dim, comm, group_size);

  struct Dims {
    int64_t split;
    int64_t concat;
  };
  Dims check() const {
    check_group_size(kName, group_size);
    const Dims dims{wrap_dim(kName, x, split_dim, "split_dim"),
                    wrap_dim(kName, x, concat_dim, "concat_dim")};
    check_divisible(kName, x, dims.split, group_size);
    return dims;
  }

  // Allocates the result of sending part r of x along split_dim to rank r: the concatenation of the
  // received parts along concat_dim, in rank order; contiguous.
  Tensor allocate() const {
    const Dims dims = check();
    auto sizes = x.sym_sizes().vec();
    sizes[dims.split] = sizes[dims.split] / group_size;
    sizes[dims.concat] = sizes[dims.concat] * group_size;
    return at::empty_symint(sizes, x.options());
  }

  // Parts are sent with concat_dim first, so that the received parts form the result up to the
  // order of its dimensions. If both dims are 0, nothing is copied.
  StartedOp start(bool async_op) const {
    const Dims dims = check();
    const auto communicator = find_comm(kName, comm, group_size);
    const int64_t part = x.size(dims.split) / group_size;
    auto parts = x.unflatten(dims.split, {group_size, part})
                     .movedim(dims.split, 0)
                     .movedim(dims.concat + 1, 1)
                     .contiguous();
    if (async_op) parts = clone_if_unversioned(parts, x);
    const auto received = at::empty(parts.sizes(), parts.options());
    auto work = communicator->all_to_all_single(received, parts, async_op);
    const auto out = received.flatten(0, 1).movedim(0, dims.concat);
    return {async_op ? out : out.contiguous(), std::move(work)};
  }

  // S(i) -> S(j): the gradient is exchanged in the opposite direction.
  static void backward(Backward<AllToAll>& pass) {
    const auto& [x, split_dim, concat_dim, comm, group_size] = pass.call;
    pass.set(x, ops::all_to_all(pass.grads[0], concat_dim, split_dim, comm, group_size));
  }
};

TORCH_OVERLAP_COLLECTIVE(AllToAll)
TORCH_OVERLAP_ASYNC("all_to_all_async", AllToAll)

}  // namespace

Tensor all_to_all(const Tensor& x, int64_t split_dim, int64_t concat_dim, std::string_view comm,
                  int64_t group_size) {
  return Operator<AllToAll>::dispatch({x, split_dim, concat_dim, comm, group_size});
}

}  // namespace torch_overlap::ops
