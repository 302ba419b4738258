#include "torch_overlap/jax/call.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/jax/stream.h"
#include "torch_overlap/ops/choose.h"

namespace torch_overlap::jax {
namespace {

ffi::ErrorCode code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kValue:
    case ErrorKind::kType:
      return ffi::ErrorCode::kInvalidArgument;
    case ErrorKind::kTimeout:
      return ffi::ErrorCode::kDeadlineExceeded;
    case ErrorKind::kUnsupported:
      return ffi::ErrorCode::kUnimplemented;
    case ErrorKind::kState:
      return ffi::ErrorCode::kFailedPrecondition;
    case ErrorKind::kInterrupted:
      return ffi::ErrorCode::kCancelled;
    case ErrorKind::kRuntime:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

ffi::ErrorOr<std::unique_ptr<Instance>> instantiate(ffi::Dictionary attributes) {
  auto instance = std::make_unique<Instance>();
  // Buffers and axes are numbered separately.
  if (const auto buffer = attributes.get<int64_t>("comm_overlap_id"); buffer.has_value()) {
    instance->site = next_call_site(-*buffer);
  } else {
    instance->site = next_call_site(attributes.get<int64_t>("axis").value());
  }
  return instance;
}

// Runs the job, and tells XLA its end or its error.
template <typename Job>
void fulfil(ffi::Promise& promise, const Job& job) {
  try {
    job();
  } catch (...) {
    promise.SetError(to_ffi_error(std::current_exception()));
    return;
  }
  promise.SetAvailable();
}

}  // namespace

ffi::TypeId Instance::id = {};

ffi::Error to_ffi_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return {code_of(ours.kind()), ours.what()};
  } catch (const c10::Error& torchs) {
    return {ffi::ErrorCode::kInternal, torchs.what_without_backtrace()};
  } catch (const std::exception& other) {
    return {ffi::ErrorCode::kInternal, other.what()};
  }
}

ffi::Future failed(const std::exception_ptr& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(to_ffi_error(error));
  return future;
}

ffi::Future run(const Caller& caller, const DeviceRank& rank, std::function<void()> body) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto act = [comm = rank.comm, body = std::move(body)] {
    const BelowDispatchGuard below;
    const ActingRankGuard acting(comm);
    body();
  };
  if (rank.executor) {
    rank.executor->submit(caller.instance->site, [act, promise](std::exception_ptr error) mutable {
      fulfil(promise, [&] {
        if (error) std::rethrow_exception(error);
        act();
      });
    });
    return future;
  }
  fulfil(promise, [&] {
    auto* const graphs = caller.addresses.empty() ? nullptr : caller.instance->graphs.get();
    run_on_stream(caller.context, rank.comm->device(), act, graphs, caller.addresses);
  });
  return future;
}

ffi::Error prepare(Instance& instance, const std::function<Call()>& bind) {
  if (instance.is_prepared) return ffi::Error::Success();
  try {
    const Call call = bind();
    const c10::DeviceGuard device(call.rank.comm->device());
    const BelowDispatchGuard below;
    const ActingRankGuard acting(call.rank.comm);
    const ops::PrepareScope scope;
    call.body();
  } catch (...) {
    return to_ffi_error(std::current_exception());
  }
  instance.is_prepared = true;
  return ffi::Error::Success();
}

}  // namespace torch_overlap::jax

// Called by XLA once for each custom call of a program that it compiles.
TORCH_OVERLAP_JAX_STAGE(InstantiateHandler, torch_overlap::jax::instantiate,
                        xla::ffi::Ffi::BindInstantiate().Attrs())

extern "C" TORCH_OVERLAP_API const XLA_FFI_TypeInfo* torch_overlap_jax_instance_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<torch_overlap::jax::Instance>();
  return &info;
}

extern "C" TORCH_OVERLAP_API XLA_FFI_TypeId* torch_overlap_jax_instance_id() {
  return &torch_overlap::jax::Instance::id;
}
