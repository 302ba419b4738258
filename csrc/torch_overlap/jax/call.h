#pragma once

#include <functional>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/jax/ffi.h"
#include "torch_overlap/jax/ranks.h"

// The part that all handlers share. A handler converts its buffers and returns run(): its body then
// computes on the device's rank.
namespace torch_overlap::jax {

// The state that XLA keeps for each custom call of a compiled program.
struct Instance {
  static ffi::TypeId id;
  CallSite site;
};

// The context that XLA passes to every handler.
struct Caller {
  ffi::Context context;
  const Instance* instance;
  int ordinal;
};

// Converts an exception to XLA's error: a JaxRuntimeError with the same text in Python.
ffi::Error to_ffi_error(const std::exception_ptr& error);
ffi::Future failed(const std::exception_ptr& error);

// Runs `body` for the rank: on the stream of the call, or, on the CPU with peers, in the order of
// all ranks (OrderedExecutor). In it, operators find the rank's communicator by its name.
ffi::Future run(const Caller& caller, const DeviceRank& rank, std::function<void()> body);

// Returns begin(), or its exception as XLA's error.
template <typename Begin>
ffi::Future guarded(const Begin& begin) {
  try {
    return begin();
  } catch (...) {
    return failed(std::current_exception());
  }
}

}  // namespace torch_overlap::jax

// Begins the binding of a handler: its first three arguments make a Caller.
#define TORCH_OVERLAP_JAX_BIND()                                \
  ::xla::ffi::Ffi::Bind()                                       \
      .Ctx<::xla::ffi::Context>()                               \
      .Ctx<::xla::ffi::State<::torch_overlap::jax::Instance>>() \
      .Ctx<::xla::ffi::DeviceOrdinal>()

// Defines the exported symbol of a handler.
#define TORCH_OVERLAP_JAX_HANDLER(name, function, binding)                    \
  extern "C" TORCH_OVERLAP_API XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding);
