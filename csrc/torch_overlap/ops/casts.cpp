#include "torch_overlap/ops/casts.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/full_like.h>

#include "torch_overlap/ops/autograd.h"

// The forward passes send nothing. A cast that keeps the value is an alias below autograd, where
// compilers know aliases; the kernels copy, for callers on any other path.
namespace torch_overlap::ops {
namespace {

struct InvariantToReplicated {
  using Result = Tensor;
  static constexpr const char* kName = "_invariant_to_replicated";
  Tensor x;
  std::string_view comm;
  int64_t group_size;
  TORCH_OVERLAP_FIELDS(x, comm, group_size);

  Tensor cast() const { return at::alias(x); }
  static void backward(Backward<InvariantToReplicated>& pass) {
    const auto& [x, comm, group_size] = pass.call;
    pass.set(x, ops::all_reduce(pass.grads[0].contiguous(), "sum", comm, group_size, "I"));
  }
};

struct ReplicatedToInvariant {
  using Result = Tensor;
  static constexpr const char* kName = "_replicated_to_invariant";
  Tensor x;
  bool mine;
  TORCH_OVERLAP_FIELDS(x, mine);

  Tensor cast() const { return at::alias(x); }
  static void backward(Backward<ReplicatedToInvariant>& pass) {
    pass.set(pass.call.x, invariant_to_partial(pass.grads[0], pass.call.mine, 0));
  }
};

struct ToPartial {
  using Result = Tensor;
  static constexpr const char* kName = "_to_partial";
  Tensor x;
  bool mine;
  double fill;
  bool invariant;
  TORCH_OVERLAP_FIELDS(x, mine, fill, invariant);

  Tensor cast() const { return mine ? at::alias(x) : at::full_like(x, fill); }
  // The gradient of a partial sum is replicated. It is x's gradient if x is invariant; if x is
  // replicated, x's gradient is partial.
  static void backward(Backward<ToPartial>& pass) {
    const auto& [x, mine, fill, invariant] = pass.call;
    pass.set(x, invariant ? replicated_to_invariant(pass.grads[0], mine)
                          : replicated_to_partial(pass.grads[0], mine, 0));
  }
};

template <typename Cast>
Tensor cast_kernel(const Cast& call) {
  auto out = call.cast();
  return out.is_alias_of(call.x) ? out.clone() : out;
}

template <typename Cast>
Tensor cast_forward(const Cast& call) {
  return call.cast();
}

template <typename Cast>
Tensor cast_autograd(const Cast& call) {
  if (!needs_autograd(call.x)) return call.cast();
  return OpFunction<Cast, cast_forward<Cast>>::apply(at::TensorList(call.x), call)[0];
}

#define TORCH_OVERLAP_CAST(Cast)                  \
  TORCH_OVERLAP_OPERATOR(Cast, cast_kernel<Cast>) \
  TORCH_OVERLAP_AUTOGRAD(Cast, cast_autograd<Cast>)
TORCH_OVERLAP_CAST(InvariantToReplicated)
TORCH_OVERLAP_CAST(ReplicatedToInvariant)
TORCH_OVERLAP_CAST(ToPartial)

}  // namespace

Tensor invariant_to_replicated(const Tensor& x, std::string_view comm, int64_t size) {
  return Operator<InvariantToReplicated>::dispatch({x, comm, size});
}

Tensor replicated_to_invariant(const Tensor& x, bool mine) {
  return Operator<ReplicatedToInvariant>::dispatch({x, mine});
}

Tensor replicated_to_partial(const Tensor& x, bool mine, double fill) {
  return Operator<ToPartial>::dispatch({x, mine, fill, /*invariant=*/false});
}

Tensor invariant_to_partial(const Tensor& x, bool mine, double fill) {
  return Operator<ToPartial>::dispatch({x, mine, fill, /*invariant=*/true});
}

}  // namespace torch_overlap::ops
