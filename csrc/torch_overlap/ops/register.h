#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/async.h"
#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/ops.h"

// What a file that defines an operator includes, and nothing else does (it is slow to compile).
//
// Such a file reads from top to bottom: the shape function, which checks the arguments and
// allocates the result and serves the Meta and the real kernel; the kernel; the gradient; the
// `_async` form; and last what is registered. An operator that is made of others is registered
// twice, as composite for autograd and as a decomposition for vmap, which would call it for each
// element otherwise.
namespace torch_overlap::ops {

using at::IValue;
using at::Scalar;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalScalar = std::optional<Scalar>;

// Kernels below autograd, views not tracked: what a Function's forward runs under.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// The operator torch_overlap::<name>. Look it up once: `static const auto op = find_op<F>("x");`
template <typename F>
auto find_op(const char* name, const char* overload = "") {
  const std::string full = std::string("torch_overlap::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), overload).typed<F>();
}

// Results that an operation started: `out` is valid once `work` is waited for.
struct Started {
  Tensor out;
  WorkPtr work;
};

// The result of the `_async` form of `op` on `x`, as the caller passed it.
inline Tensor noted(std::string_view op, const Tensor& x, Started started) {
  note_work(op, x, started.out, std::move(started.work));
  return std::move(started.out);
}

// What TORCH_OVERLAP_KERNELS registers with. Each kernel is a boundary for errors.
class Kernels {
 public:
  explicit Kernels(torch::Library& library) : library_(library) {}

  template <typename Result, typename... Args>
  void impl(const char* name, Result (*kernel)(Args...)) {
    library_.impl(name, [kernel](Args... args) -> Result {
      return at_boundary([&]() -> Result { return kernel(std::forward<Args>(args)...); });
    });
  }
  // One of torch's own.
  void impl(const char* name, torch::CppFunction kernel) { library_.impl(name, std::move(kernel)); }

 private:
  torch::Library& library_;
};

// What a direct call of a kernel needs that the dispatcher would otherwise do first.
inline Tensor materialized(const Tensor& x) { return x.resolve_conj().resolve_neg(); }

}  // namespace torch_overlap::ops

// TORCH_OVERLAP_KERNELS(Meta, m) { m.impl("all_gather", all_gather_meta); ... }: the operators'
// kernels for a dispatch key, in place of TORCH_LIBRARY_IMPL.
#define TORCH_OVERLAP_KERNELS(key, m) TORCH_OVERLAP_KERNELS_NAMED(key, m, C10_UID)
#define TORCH_OVERLAP_KERNELS_NAMED(key, m, uid)                                      \
  static void C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels m); \
  TORCH_LIBRARY_IMPL(torch_overlap, key, library) {                                   \
    C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels(library));    \
  }                                                                                   \
  static void C10_CONCATENATE(register_kernels_, uid)(torch_overlap::ops::Kernels m)
