#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/async.h"
#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/ops.h"

// Include this only in files that define an operator: it is slow to compile.
//
// Such a file reads from top to bottom: the shape function, which checks the arguments and
// allocates the result for both the Meta and the real kernel; the kernel; the gradient; the
// `_async` form; and the registrations.
namespace torch_overlap::ops {

using at::IValue;
using at::Scalar;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalScalar = std::optional<Scalar>;

// Dispatches below autograd without view tracking, for a Function's forward.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Returns the operator torch_overlap::<name>. Look it up once: `static const auto op =
// find_op<F>("x");`
template <typename F>
auto find_op(const char* name, const char* overload = "") {
  const std::string full = std::string("torch_overlap::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), overload).typed<F>();
}

// Result of an operation that was started: `out` is valid once `work` has been waited for.
struct StartedOp {
  Tensor out;
  WorkPtr work;
};

// Returns the result of the `_async` form of `op` on `x`, as the caller passed it.
inline Tensor register_started(std::string_view op, const Tensor& x, StartedOp started) {
  register_pending_work(op, x, started.out, std::move(started.work));
  return std::move(started.out);
}

template <typename Op, typename Fields>
class OperatorOf;
template <typename Op>
using Operator = OperatorOf<Op, decltype(std::declval<const Op&>().fields())>;

// Registers kernels for TORCH_OVERLAP_KERNELS. Each kernel translates its exceptions.
class Kernels {
 public:
  explicit Kernels(torch::Library& library) : library_(library) {}

  template <typename Result, typename... Args>
  void impl(const char* name, Result (*kernel)(Args...)) {
    library_.impl(name, [kernel](Args... args) -> Result {
      return with_exception_translation(
          [&]() -> Result { return kernel(std::forward<Args>(args)...); });
    });
  }
  // Registers a kernel of an operator (operator.h).
  template <typename Op, auto kKernel>
  void impl() {
    impl(Op::kName, &Operator<Op>::template unpacked<kKernel>);
  }
  // Registers one of torch's own kernels.
  void impl(const char* name, torch::CppFunction kernel) { library_.impl(name, std::move(kernel)); }

 private:
  torch::Library& library_;
};

// Materializes conj and neg bits, as the dispatcher would, for a direct call of a kernel.
inline Tensor materialized(const Tensor& x) { return x.resolve_conj().resolve_neg(); }

}  // namespace torch_overlap::ops

// TORCH_OVERLAP_KERNELS(Meta, m) { m.impl("all_gather", all_gather_meta); ... }: registers the
// operators' kernels for a dispatch key. Use it instead of TORCH_LIBRARY_IMPL.
#define TORCH_OVERLAP_KERNELS(key, m) TORCH_OVERLAP_KERNELS_NAMED(key, m, C10_UID)
#define TORCH_OVERLAP_KERNELS_NAMED(key, m, uid)                                      \
  static void C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels m); \
  TORCH_LIBRARY_IMPL(torch_overlap, key, library) {                                   \
    C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels(library));    \
  }                                                                                   \
  static void C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels m)

// TORCH_OVERLAP_SCHEMAS("f(Tensor x) -> Tensor", ...): defines operators, which compilers can
// trace.
#define TORCH_OVERLAP_SCHEMAS(...)                                            \
  TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {                                  \
    for (const std::string& schema : std::vector<std::string>{__VA_ARGS__}) { \
      m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});                    \
    }                                                                         \
  }

// Registers operators without a gradient: a backward pass raises an error.
#define TORCH_OVERLAP_NO_GRADIENT(...)                                 \
  TORCH_OVERLAP_KERNELS(Autograd, m) {                                 \
    for (const char* const name : {__VA_ARGS__}) {                     \
      m.impl(name, torch::autograd::autogradNotImplementedFallback()); \
    }                                                                  \
  }

// Registers an operator that is composed of others: as composite for autograd, and as a
// decomposition for vmap, which would otherwise call it for each element.
#define TORCH_OVERLAP_COMPOSITE(name, kernel)                                   \
  TORCH_OVERLAP_KERNELS(CompositeImplicitAutograd, m) { m.impl(name, kernel); } \
  TORCH_OVERLAP_KERNELS(FuncTorchBatchedDecomposition, m) { m.impl(name, kernel); }
