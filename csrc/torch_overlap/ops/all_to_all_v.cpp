#include <ATen/ops/empty.h>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllToAllV = "all_to_all_v";

c10::SymInt total(c10::SymIntArrayRef splits, std::string_view what) {
  c10::SymInt sum = 0;
  for (const auto& split : splits) {
    TORCH_OVERLAP_CHECK(split.sym_ge(0).expect_true(__FILE__, __LINE__), kValue, kAllToAllV,
                        ": expected entries >= 0 for ", what, ", got ", split,
                        ". Pass the number of slices for each rank.");
    sum = sum + split;
  }
  return sum;
}

// Allocates the result: in_splits[r] slices of dimension 0 go to rank r, out_splits[r] are received
// from it; contiguous.
Tensor all_to_all_v_out(const Tensor& x, c10::SymIntArrayRef out_splits,
                        c10::SymIntArrayRef in_splits) {
  wrap_dim(kAllToAllV, x, 0, "dim");
  TORCH_OVERLAP_CHECK(out_splits.size() == in_splits.size() && !in_splits.empty(), kValue,
                      kAllToAllV,
                      ": expected one entry for each rank in out_splits and in in_splits, got ",
                      out_splits.size(), " and ", in_splits.size(), ". Zeros are fine.");
  check_size(kAllToAllV, "in_splits with the sum", x.sym_size(0), total(in_splits, "in_splits"));
  auto sizes = x.sym_sizes().vec();
  sizes[0] = total(out_splits, "out_splits");
  return at::empty_symint(sizes, x.options());
}

std::vector<int64_t> concrete(c10::SymIntArrayRef splits) {
  std::vector<int64_t> values;
  values.reserve(splits.size());
  for (const auto& split : splits) values.push_back(split.guard_int(__FILE__, __LINE__));
  return values;
}

StartedOp start(const Tensor& x, c10::SymIntArrayRef out_splits, c10::SymIntArrayRef in_splits,
                std::string_view comm, bool async_op) {
  auto out = all_to_all_v_out(x, out_splits, in_splits);
  if (x.is_meta()) return {std::move(out), nullptr};
  const auto communicator = find_comm(comm);
  TORCH_OVERLAP_CHECK(static_cast<int64_t>(in_splits.size()) == communicator->size(), kValue,
                      kAllToAllV, ": expected one entry for each of the ", communicator->size(),
                      " ranks of '", comm, "' in out_splits and in in_splits, got ",
                      in_splits.size(), ". Zeros are fine.");
  const auto sent = async_op ? clone_if_unversioned(x.contiguous(), x) : x.contiguous();
  auto work = communicator->all_to_all_v_single(out, sent, concrete(out_splits),
                                                concrete(in_splits), async_op);
  return {std::move(out), std::move(work)};
}

Tensor all_to_all_v_kernel(const Tensor& x, c10::SymIntArrayRef out_splits,
                           c10::SymIntArrayRef in_splits, std::string_view comm) {
  return start(x, out_splits, in_splits, comm, /*async_op=*/false).out;
}

// The gradient is exchanged in the opposite direction, with the splits swapped.
class AllToAllV : public Function<AllToAllV> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, c10::SymIntArrayRef out_splits,
                        c10::SymIntArrayRef in_splits, std::string_view comm, bool async_op) {
    ctx->saved_data["out_splits"] = IValue(out_splits);
    ctx->saved_data["in_splits"] = IValue(in_splits);
    ctx->saved_data["comm"] = std::string(comm);
    const BelowAutograd guard;
    if (!async_op) return ops::all_to_all_v(x, out_splits, in_splits, comm);
    return register_started(kAllToAllV, x,
                            start(materialized(x), out_splits, in_splits, comm, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::all_to_all_v(grads[0], ctx->saved_data["in_splits"].toSymIntVector(),
                              ctx->saved_data["out_splits"].toSymIntVector(),
                              ctx->saved_data["comm"].toStringRef()),
            {},
            {},
            {},
            {}};
  }
};

Tensor all_to_all_v_autograd(const Tensor& x, c10::SymIntArrayRef out_splits,
                             c10::SymIntArrayRef in_splits, std::string_view comm) {
  if (needs_autograd(x)) return AllToAllV::apply(x, out_splits, in_splits, comm, false);
  const BelowAutograd guard;
  return ops::all_to_all_v(x, out_splits, in_splits, comm);
}

Tensor all_to_all_v_async(const Tensor& x, c10::SymIntArrayRef out_splits,
                          c10::SymIntArrayRef in_splits, std::string_view comm) {
  if (!can_start_async(x)) return ops::all_to_all_v(x, out_splits, in_splits, comm);
  if (needs_autograd(x)) return AllToAllV::apply(x, out_splits, in_splits, comm, true);
  const BelowAutograd guard;
  return register_started(kAllToAllV, x, start(materialized(x), out_splits, in_splits, comm, true));
}

}  // namespace

Tensor all_to_all_v(const Tensor& x, c10::SymIntArrayRef out_splits, c10::SymIntArrayRef in_splits,
                    std::string_view comm) {
  static const auto handle = find_op<decltype(all_to_all_v_kernel)>("all_to_all_v");
  return handle.call(x, out_splits, in_splits, comm);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "all_to_all_v(Tensor x, SymInt[] out_splits, SymInt[] in_splits, str comm) -> Tensor",
    "all_to_all_v_async(Tensor x, SymInt[] out_splits, SymInt[] in_splits, str comm) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_to_all_v", torch_overlap::ops::all_to_all_v_kernel);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_to_all_v", torch_overlap::ops::all_to_all_v_autograd);
}

TORCH_OVERLAP_COMPOSITE("all_to_all_v_async", torch_overlap::ops::all_to_all_v_async)
