#include <ATen/ops/empty.h>

#include <set>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct Permute {
  using Result = Tensor;
  static constexpr const char* kName = "permute";
  Tensor x;
  std::vector<int64_t> pairs;  // src0, dst0, src1, dst1, ...
  std::string_view comm;
  TORCH_OVERLAP_FIELDS(x, pairs, comm);

  // Allocates a contiguous tensor of x's shape.
  Tensor allocate() const {
    TORCH_OVERLAP_CHECK(pairs.size() % 2 == 0, kValue, kName,
                        ": expected pairs as src0, dst0, src1, dst1, ..., got ", list_string(pairs),
                        ". Each source has a target.");
    std::set<int64_t> sources;
    std::set<int64_t> targets;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      TORCH_OVERLAP_CHECK(pairs[i] >= 0 && pairs[i + 1] >= 0, kValue, kName,
                          ": expected ranks >= 0 in pairs, got ", list_string(pairs),
                          ". Ranks do not count from the end.");
      TORCH_OVERLAP_CHECK(sources.insert(pairs[i]).second && targets.insert(pairs[i + 1]).second,
                          kValue, kName,
                          ": expected every rank at most once as a source and once as a target in "
                          "pairs, got ",
                          list_string(pairs), ". Use several calls.");
    }
    return at::empty_symint(x.sym_sizes(), x.options());
  }

  StartedOp start(bool async_op) const {
    auto out = allocate();
    const auto communicator = find_comm(comm);
    const auto sent = async_op ? clone_if_unversioned(x.contiguous(), x) : x.contiguous();
    std::vector<P2POp> moves;
    bool receives = false;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      const int64_t src = pairs[i];
      const int64_t dst = pairs[i + 1];
      TORCH_OVERLAP_CHECK(src < communicator->size() && dst < communicator->size(), kValue, kName,
                          ": expected ranks below ", communicator->size(), ", the size of '", comm,
                          "', in pairs, got ", list_string(pairs),
                          ". Ranks are those of this communicator.");
      if (src == communicator->rank()) {
        moves.push_back({P2POp::Type::SEND, sent, static_cast<int>(dst)});
      }
      if (dst == communicator->rank()) {
        moves.push_back({P2POp::Type::RECV, out, static_cast<int>(src)});
        receives = true;
      }
    }
    if (!receives) out.zero_();
    auto work = moves.empty() ? nullptr : communicator->batch_send_recv(std::move(moves), async_op);
    return {std::move(out), std::move(work)};
  }

  // The gradient is sent in the opposite direction.
  static void backward(Backward<Permute>& pass) {
    auto inverse = pass.call.pairs;
    for (size_t i = 0; i < inverse.size(); i += 2) std::swap(inverse[i], inverse[i + 1]);
    pass.set(pass.call.x, ops::permute(pass.grads[0], inverse, pass.call.comm));
  }
};

TORCH_OVERLAP_COLLECTIVE(Permute)
TORCH_OVERLAP_ASYNC("permute_async", Permute)

}  // namespace

Tensor permute(const Tensor& x, at::IntArrayRef pairs, std::string_view comm) {
  return Operator<Permute>::dispatch({x, pairs.vec(), comm});
}

}  // namespace torch_overlap::ops
