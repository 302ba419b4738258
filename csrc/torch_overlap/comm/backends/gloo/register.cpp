#include <algorithm>
#include <chrono>
#include <mutex>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/gloo/gloo.h"
#include "torch_overlap/comm/backends/gloo/gloo_transport.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/host/host_backend.h"

namespace torch_overlap {
namespace {

struct Holder {
  std::mutex mutex;
  GlooFactory factory;
};

// Never destroyed: the factory may hold a Python object, which must not die after Python.
Holder& holder() {
  static auto* instance = new Holder;
  return *instance;
}

GlooFactory require_factory() {
  std::lock_guard lock(holder().mutex);
  TORCH_OVERLAP_CHECK(holder().factory, kUnsupported,
                      "new_comm: expected a maker of gloo process groups for backend 'gloo', got "
                      "none; import torch_overlap in Python, or use backend 'local' or 'nccl' in a "
                      "C++ program");
  return holder().factory;
}

std::optional<std::string> take(Hints& hints, const char* key,
                                const std::optional<std::string>& from_environment) {
  const auto found = hints.find(key);
  if (found == hints.end()) return from_environment;
  auto value = std::move(found->second);
  hints.erase(found);
  return value;
}

GlooRequest make_request(const BackendContext& context) {
  const Env env = Env::read();
  Hints hints = context.options.hints;
  GlooRequest request{.store = context.store,
                      .rank = context.rank,
                      .size = context.size,
                      .timeout = context.options.timeout,
                      .hostname = take(hints, "hostname", env.gloo_hostname),
                      .interface = take(hints, "interface", env.gloo_interface)};
  warn_unknown_hints(hints, "gloo");
  TORCH_OVERLAP_CHECK(!request.hostname || !request.interface, kValue,
                      "new_comm: expected a hostname or an interface for gloo, got both ('",
                      *request.hostname, "' and '", *request.interface, "')");
  return request;
}

// gloo's own timeout is one of each attempt to reach each rank.
c10::intrusive_ptr<c10d::Backend> connect(const BackendContext& context) {
  const auto group = std::make_shared<c10::intrusive_ptr<c10d::Backend>>();
  const auto make = [group, factory = require_factory(), request = make_request(context)] {
    *group = factory(request);
  };
  const Milliseconds timeout = context.options.timeout;
  TORCH_OVERLAP_CHECK(run_bounded(make, timeout), kTimeout, "new_comm: expected gloo to connect ",
                      context.size, " ranks within ", timeout.count(),
                      " ms, got no answer of one; look at the other ranks");
  TORCH_OVERLAP_CHECK(*group, kRuntime, "new_comm: expected a gloo process group, got none");
  return *group;
}

std::shared_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + context.options.timeout;
  auto group = connect(context);
  // A rank that is done with it closes its connections, also those that a slower rank is still
  // making: nobody goes on before all are connected.
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
  exchange(*context.store, "gloo connections", context.rank, context.size, "",
           std::max(left, Milliseconds(1)));
  return std::make_shared<HostBackend>(context, std::make_unique<GlooTransport>(std::move(group)),
                                       make_gloo_backend);
}

const BackendRegistration gloo_registration("gloo", {.make = make_gloo_backend,
                                                     .devices = {c10::kCPU, c10::kCUDA}});

}  // namespace

void set_gloo_factory(GlooFactory factory) {
  GlooFactory old;  // dies outside the lock
  std::lock_guard lock(holder().mutex);
  old = std::exchange(holder().factory, std::move(factory));
}

}  // namespace torch_overlap
