#include <ATen/ops/empty.h>

#include "torch_overlap/ops/collective.h"

namespace torch_overlap::ops {
namespace {

struct AllToAllV {
  using Result = Tensor;
  using Splits = std::vector<c10::SymInt>;
  static constexpr const char* kName = "all_to_all_v";
  Tensor x;
  Splits out_splits;  // slices of dimension 0 that are received from each rank
  Splits in_splits;   // and that are sent to it
  std::string_view comm;
  TORCH_OVERLAP_FIELDS(x, out_splits, in_splits, comm);

  // Allocates the received slices, in rank order; contiguous.
  Tensor allocate() const {
    wrap_dim(kName, x, 0, "dim");
    TORCH_OVERLAP_CHECK(out_splits.size() == in_splits.size() && !in_splits.empty(), kValue, kName,
                        ": expected one entry for each rank in out_splits and in in_splits, got ",
                        out_splits.size(), " and ", in_splits.size(), ". Zeros are fine.");
    check_size(kName, "in_splits with the sum", x.sym_size(0), total(in_splits, "in_splits"));
    auto sizes = x.sym_sizes().vec();
    sizes[0] = total(out_splits, "out_splits");
    return at::empty_symint(sizes, x.options());
  }

  StartedOp start(bool async_op) const {
    auto out = allocate();
    const auto communicator = find_comm(comm);
    TORCH_OVERLAP_CHECK(static_cast<int64_t>(in_splits.size()) == communicator->size(), kValue,
                        kName, ": expected one entry for each of the ", communicator->size(),
                        " ranks of '", comm, "' in out_splits and in in_splits, got ",
                        in_splits.size(), ". Zeros are fine.");
    const auto sent = async_op ? clone_if_unversioned(x.contiguous(), x) : x.contiguous();
    auto work = communicator->all_to_all_v_single(out, sent, concrete(out_splits),
                                                  concrete(in_splits), async_op);
    return {std::move(out), std::move(work)};
  }

  // The gradient is exchanged in the opposite direction, with the splits swapped.
  static void backward(Backward<AllToAllV>& pass) {
    const auto& [x, out_splits, in_splits, comm] = pass.call;
    pass.set(x, ops::all_to_all_v(pass.grads[0], in_splits, out_splits, comm));
  }

 private:
  static c10::SymInt total(const Splits& splits, std::string_view what) {
    c10::SymInt sum = 0;
    for (const auto& split : splits) {
      TORCH_OVERLAP_CHECK(split.sym_ge(0).expect_true(__FILE__, __LINE__), kValue, kName,
                          ": expected entries >= 0 for ", what, ", got ", split,
                          ". Pass the number of slices for each rank.");
      sum = sum + split;
    }
    return sum;
  }

  static std::vector<int64_t> concrete(const Splits& splits) {
    std::vector<int64_t> values;
    values.reserve(splits.size());
    for (const auto& split : splits) values.push_back(split.guard_int(__FILE__, __LINE__));
    return values;
  }
};

TORCH_OVERLAP_COLLECTIVE(AllToAllV)
TORCH_OVERLAP_ASYNC("all_to_all_v_async", AllToAllV)

}  // namespace

Tensor all_to_all_v(const Tensor& x, c10::SymIntArrayRef out_splits, c10::SymIntArrayRef in_splits,
                    std::string_view comm) {
  return Operator<AllToAllV>::dispatch({x, out_splits.vec(), in_splits.vec(), comm});
}

}  // namespace torch_overlap::ops
