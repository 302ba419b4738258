#include <ATen/ops/empty.h>

#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

// Allocates a contiguous tensor of x's shape, which is the same on all ranks. Serves both operators
// of this file.
Tensor rooted_out(std::string_view op, const Tensor& x, int64_t root) {
  check_rank(op, "root", root);
  return at::empty_symint(x.sym_sizes(), x.options());
}

// The two operators are the gradients of each other.
struct Broadcast {
  using Result = Tensor;
  static constexpr const char* kName = "broadcast";
  Tensor x;
  int64_t root;
  std::string_view comm;
  TORCH_OVERLAP_FIELDS(x, root, comm);

  Tensor allocate() const { return rooted_out("broadcast", x, root); }

  // Broadcasts the root's x to every rank.
  StartedOp start(bool async_op) const {
    auto out = allocate();
    const auto communicator = find_comm(comm);
    if (communicator->rank() == root) out.copy_(x);
    auto work = communicator->broadcast(out, static_cast<int>(root), async_op);
    return {std::move(out), std::move(work)};
  }

  static void backward(Backward<Broadcast>& pass) {
    pass.set(pass.call.x, ops::reduce_to_root(pass.grads[0], pass.call.root, pass.call.comm));
  }
};

struct ReduceToRoot {
  using Result = Tensor;
  static constexpr const char* kName = "_reduce_to_root";
  Tensor x;
  int64_t root;
  std::string_view comm;
  TORCH_OVERLAP_FIELDS(x, root, comm);

  Tensor allocate() const { return rooted_out("reduce_to_root", x, root); }

  // Returns the sum of all ranks' x on the root, zeros elsewhere.
  StartedOp start(bool /*async_op*/) const {
    auto out = allocate();
    const auto communicator = find_comm(comm);
    out.copy_(x);
    communicator->reduce(out, static_cast<int>(root), RedOpType::SUM, /*async_op=*/false);
    if (communicator->rank() != root) out.zero_();
    return {std::move(out), nullptr};
  }

  static void backward(Backward<ReduceToRoot>& pass) {
    pass.set(pass.call.x, ops::broadcast(pass.grads[0], pass.call.root, pass.call.comm));
  }
};

TORCH_OVERLAP_COLLECTIVE(Broadcast)
TORCH_OVERLAP_ASYNC("broadcast_async", Broadcast)
TORCH_OVERLAP_COLLECTIVE(ReduceToRoot)

}  // namespace

Tensor broadcast(const Tensor& x, int64_t root, std::string_view comm) {
  return Operator<Broadcast>::dispatch({x, root, comm});
}

Tensor reduce_to_root(const Tensor& x, int64_t root, std::string_view comm) {
  return Operator<ReduceToRoot>::dispatch({x, root, comm});
}

}  // namespace torch_overlap::ops
