#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "torch_overlap/base/export.h"
#include "torch_overlap/jax/ffi.h"
#include "torch_overlap/jax/ranks.h"
#include "torch_overlap/jax/stream.h"

// The part that all handlers share. A handler binds its buffers to a Call; Stages makes of it the
// functions that XLA calls.
namespace torch_overlap::jax {

// The state that XLA keeps for each custom call of a compiled program.
struct Instance {
  static ffi::TypeId id;
  CallSite site;
  std::atomic<bool> is_prepared = false;
  std::unique_ptr<CapturedGraphs> graphs = make_captured_graphs();
};

// The context that XLA passes to every handler.
struct Caller {
  ffi::Context context;
  const Instance* instance;
  int ordinal;
  // Empty: the call is not captured.
  Addresses addresses{};
};

// The computation of a custom call, and the rank that runs it.
struct Call {
  DeviceRank rank;
  std::function<void()> body;
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

// Prepares the body's operators for the rank, once: XLA may capture the first run in a CUDA graph,
// where no memory can be shared. Collective; the programs of all ranks begin in one order.
ffi::Error prepare(Instance& instance, const std::function<Call()>& bind);

// Appends the address of an argument that is a buffer.
inline void append_address(Addresses& addresses, const ffi::AnyBuffer& buffer) {
  addresses.push_back(buffer.untyped_data());
}
inline void append_address(Addresses& addresses, ffi::Result<ffi::AnyBuffer> buffer) {
  addresses.push_back(buffer->untyped_data());
}
template <typename T>
void append_address(Addresses&, const T&) {}

// The stages of a handler whose `kBind(ordinal, arguments...)` returns a Call.
template <auto kBind>
struct Stages;
template <typename... Arguments, Call (*kBind)(int, Arguments...)>
struct Stages<kBind> {
  static ffi::Future execute(ffi::Context context, Instance* instance, int32_t ordinal,
                             Arguments... arguments) {
    return guarded([&] {
      Addresses addresses;
      (append_address(addresses, arguments), ...);
      Call call = kBind(ordinal, std::move(arguments)...);
      return run({context, instance, ordinal, std::move(addresses)}, call.rank,
                 std::move(call.body));
    });
  }
  static ffi::Error initialize(ffi::Context /*context*/, Instance* instance, int32_t ordinal,
                               Arguments... arguments) {
    return prepare(*instance, [&] { return kBind(ordinal, std::move(arguments)...); });
  }
};

}  // namespace torch_overlap::jax

// Begins the binding of a stage, kExecute or kInitialize.
#define TORCH_OVERLAP_JAX_BIND(stage)                           \
  ::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::stage>()    \
      .Ctx<::xla::ffi::Context>()                               \
      .Ctx<::xla::ffi::State<::torch_overlap::jax::Instance>>() \
      .Ctx<::xla::ffi::DeviceOrdinal>()

// Defines the exported symbol of a stage.
#define TORCH_OVERLAP_JAX_STAGE(name, ...)                                    \
  extern "C" TORCH_OVERLAP_API XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, __VA_ARGS__);
// Those of the stage that computes: by itself, and for XLA to capture in CUDA graphs.
#define TORCH_OVERLAP_JAX_HANDLER(name, function, binding)          \
  TORCH_OVERLAP_JAX_STAGE(name##Handler, function, binding)         \
  TORCH_OVERLAP_JAX_STAGE(name##CapturedHandler, function, binding, \
                          {::xla::ffi::Traits::kCmdBufferCompatible})
