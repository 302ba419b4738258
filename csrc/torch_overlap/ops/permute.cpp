#include <ATen/ops/empty.h>

#include <set>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kPermute = "permute";

// Allocates a contiguous tensor of x's shape. `pairs` is src0, dst0, src1, dst1, ...: no rank sends
// or receives twice.
Tensor permute_out(const Tensor& x, at::IntArrayRef pairs) {
  TORCH_OVERLAP_CHECK(pairs.size() % 2 == 0, kValue, kPermute,
                      ": expected pairs as src0, dst0, src1, dst1, ..., got ", list_string(pairs),
                      ". Each source has a target.");
  std::set<int64_t> sources;
  std::set<int64_t> targets;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    TORCH_OVERLAP_CHECK(pairs[i] >= 0 && pairs[i + 1] >= 0, kValue, kPermute,
                        ": expected ranks >= 0 in pairs, got ", list_string(pairs),
                        ". Ranks do not count from the end.");
    TORCH_OVERLAP_CHECK(sources.insert(pairs[i]).second && targets.insert(pairs[i + 1]).second,
                        kValue, kPermute,
                        ": expected every rank at most once as a source and once as a target in "
                        "pairs, got ",
                        list_string(pairs), ". Use several calls.");
  }
  return at::empty_symint(x.sym_sizes(), x.options());
}

StartedOp start(const Tensor& x, at::IntArrayRef pairs, std::string_view comm, bool async_op) {
  auto out = permute_out(x, pairs);
  if (x.is_meta()) return {std::move(out), nullptr};
  const auto communicator = find_comm(comm);
  const auto mine = async_op ? clone_if_unversioned(x.contiguous(), x) : x.contiguous();
  std::vector<P2POp> moves;
  bool receives = false;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const int64_t src = pairs[i];
    const int64_t dst = pairs[i + 1];
    TORCH_OVERLAP_CHECK(src < communicator->size() && dst < communicator->size(), kValue, kPermute,
                        ": expected ranks below ", communicator->size(), ", the size of '", comm,
                        "', in pairs, got ", list_string(pairs),
                        ". Ranks are those of this communicator.");
    if (src == communicator->rank()) {
      moves.push_back({P2POp::Type::SEND, mine, static_cast<int>(dst)});
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

Tensor permute_kernel(const Tensor& x, at::IntArrayRef pairs, std::string_view comm) {
  return start(x, pairs, comm, /*async_op=*/false).out;
}

// The gradient is sent in the opposite direction.
class Permute : public Function<Permute> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::IntArrayRef pairs,
                        std::string_view comm, bool async_op) {
    std::vector<int64_t> inverse(pairs.begin(), pairs.end());
    for (size_t i = 0; i + 1 < inverse.size(); i += 2) std::swap(inverse[i], inverse[i + 1]);
    ctx->saved_data["inverse"] = IValue(inverse);
    ctx->saved_data["comm"] = std::string(comm);
    const BelowAutograd guard;
    if (!async_op) return ops::permute(x, pairs, comm);
    return register_started(kPermute, x, start(materialized(x), pairs, comm, true));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::permute(grads[0], ctx->saved_data["inverse"].toIntVector(),
                         ctx->saved_data["comm"].toStringRef()),
            {},
            {},
            {}};
  }
};

Tensor permute_autograd(const Tensor& x, at::IntArrayRef pairs, std::string_view comm) {
  if (needs_autograd(x)) return Permute::apply(x, pairs, comm, false);
  const BelowAutograd guard;
  return ops::permute(x, pairs, comm);
}

Tensor permute_async(const Tensor& x, at::IntArrayRef pairs, std::string_view comm) {
  if (!can_start_async(x)) return ops::permute(x, pairs, comm);
  if (needs_autograd(x)) return Permute::apply(x, pairs, comm, true);
  const BelowAutograd guard;
  return register_started(kPermute, x, start(materialized(x), pairs, comm, true));
}

}  // namespace

Tensor permute(const Tensor& x, at::IntArrayRef pairs, std::string_view comm) {
  static const auto handle = find_op<decltype(permute_kernel)>("permute");
  return handle.call(x, pairs, comm);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS("permute(Tensor x, int[] pairs, str comm) -> Tensor",
                      "permute_async(Tensor x, int[] pairs, str comm) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("permute", torch_overlap::ops::permute_kernel);
}

TORCH_OVERLAP_KERNELS(Autograd, m) { m.impl("permute", torch_overlap::ops::permute_autograd); }

TORCH_OVERLAP_COMPOSITE("permute_async", torch_overlap::ops::permute_async)
