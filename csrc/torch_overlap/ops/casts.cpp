#include <ATen/ops/alias.h>
#include <ATen/ops/full_like.h>

#include "torch_overlap/ops/casts.h"
#include "torch_overlap/ops/register.h"

// The forward passes send nothing. A cast that keeps the value is an alias below autograd, where
// compilers know aliases; the kernels copy, for callers on any other path.
namespace torch_overlap::ops {
namespace {

Tensor value_or_fill(const Tensor& x, bool mine, double fill) {
  return mine ? at::alias(x) : at::full_like(x, fill);
}

// --- I -> R -------------------------------------------------------------------------------------

class InvariantToReplicated : public Function<InvariantToReplicated> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, std::string_view comm,
                        int64_t group_size) {
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    const BelowAutograd guard;
    return at::alias(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::all_reduce(grads[0].contiguous(), "sum", ctx->saved_data["comm"].toStringRef(),
                            ctx->saved_data["group_size"].toInt(), "I"),
            {},
            {}};
  }
};

Tensor invariant_to_replicated_kernel(const Tensor& x, std::string_view, int64_t) {
  return x.clone();
}
Tensor invariant_to_replicated_autograd(const Tensor& x, std::string_view comm,
                                        int64_t group_size) {
  if (needs_autograd(x)) return InvariantToReplicated::apply(x, comm, group_size);
  return at::alias(x);
}

// --- R -> I -------------------------------------------------------------------------------------

class ReplicatedToInvariant : public Function<ReplicatedToInvariant> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, bool mine) {
    ctx->saved_data["mine"] = mine;
    const BelowAutograd guard;
    return at::alias(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {invariant_to_partial(grads[0], ctx->saved_data["mine"].toBool(), 0), {}};
  }
};

Tensor replicated_to_invariant_kernel(const Tensor& x, bool) { return x.clone(); }
Tensor replicated_to_invariant_autograd(const Tensor& x, bool mine) {
  if (needs_autograd(x)) return ReplicatedToInvariant::apply(x, mine);
  return at::alias(x);
}

// --- to P ---------------------------------------------------------------------------------------

class ToPartial : public Function<ToPartial> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, bool mine, double fill,
                        bool invariant) {
    ctx->saved_data["mine"] = mine;
    ctx->saved_data["invariant"] = invariant;
    const BelowAutograd guard;
    return value_or_fill(x, mine, fill);
  }

  // The gradient of a partial sum is replicated. It is x's gradient if x is invariant; if x is
  // replicated, x's gradient is partial.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool mine = ctx->saved_data["mine"].toBool();
    const bool invariant = ctx->saved_data["invariant"].toBool();
    return {invariant ? replicated_to_invariant(grads[0], mine)
                      : replicated_to_partial(grads[0], mine, 0),
            {},
            {},
            {}};
  }
};

Tensor to_partial_kernel(const Tensor& x, bool mine, double fill, bool) {
  return mine ? x.clone() : at::full_like(x, fill);
}
Tensor to_partial_autograd(const Tensor& x, bool mine, double fill, bool invariant) {
  if (needs_autograd(x)) return ToPartial::apply(x, mine, fill, invariant);
  return value_or_fill(x, mine, fill);
}

Tensor to_partial(const Tensor& x, bool mine, double fill, bool invariant) {
  static const auto handle = find_op<decltype(to_partial_kernel)>("_to_partial");
  return handle.call(x, mine, fill, invariant);
}

}  // namespace

Tensor invariant_to_replicated(const Tensor& x, const std::string& comm, int64_t size) {
  static const auto handle =
      find_op<decltype(invariant_to_replicated_kernel)>("_invariant_to_replicated");
  return handle.call(x, comm, size);
}

Tensor replicated_to_invariant(const Tensor& x, bool mine) {
  static const auto handle =
      find_op<decltype(replicated_to_invariant_kernel)>("_replicated_to_invariant");
  return handle.call(x, mine);
}

Tensor replicated_to_partial(const Tensor& x, bool mine, double fill) {
  return to_partial(x, mine, fill, /*invariant=*/false);
}

Tensor invariant_to_partial(const Tensor& x, bool mine, double fill) {
  return to_partial(x, mine, fill, /*invariant=*/true);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS("_invariant_to_replicated(Tensor x, str comm, int group_size) -> Tensor",
                      "_replicated_to_invariant(Tensor x, bool mine) -> Tensor",
                      "_to_partial(Tensor x, bool mine, float fill, bool invariant) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_invariant_to_replicated", torch_overlap::ops::invariant_to_replicated_kernel);
  m.impl("_replicated_to_invariant", torch_overlap::ops::replicated_to_invariant_kernel);
  m.impl("_to_partial", torch_overlap::ops::to_partial_kernel);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("_invariant_to_replicated", torch_overlap::ops::invariant_to_replicated_autograd);
  m.impl("_replicated_to_invariant", torch_overlap::ops::replicated_to_invariant_autograd);
  m.impl("_to_partial", torch_overlap::ops::to_partial_autograd);
}
