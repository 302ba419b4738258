#include <algorithm>
#include <chrono>
#include <mutex>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/gloo/gloo.h"
#include "torch_overlap/comm/backends/gloo/gloo_transport.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/host/host_backend.h"

namespace torch_overlap {
namespace {

struct Holder {
  ForkSafeMutex mutex;
  GlooFactory factory;
};

Holder& holder() { return LeakySingleton<Holder>::get(); }

GlooFactory require_factory() {
  std::lock_guard lock(holder().mutex);
  TORCH_OVERLAP_CHECK(holder().factory, kUnsupported,
                      "new_comm: expected a maker of gloo process groups for backend 'gloo', got "
                      "none; import torch_overlap in Python, or use backend 'local' or 'nccl' in a "
                      "C++ program");
  return holder().factory;
}

std::optional<std::string> take(Hints& hints, const char* key) {
  const auto found = hints.find(key);
  if (found == hints.end()) return std::nullopt;
  auto value = std::move(found->second);
  hints.erase(found);
  return value;
}

// `lazy`: ranks connect at their first message, which saves connections in large groups where not
// all ranks exchange messages. At most one part of the address is set.
struct GlooHints {
  std::optional<std::string> hostname;
  std::optional<std::string> interface;
  bool lazy = false;
};

// The address is that of the hints if either is set, otherwise the environment's.
GlooHints read_hints(Hints hints) {
  GlooHints address{.hostname = take(hints, "hostname"), .interface = take(hints, "interface")};
  // Without a value that parses, torchcomms' hint means true.
  if (const auto lazy = take(hints, "lazy")) {
    address.lazy = lazy->empty() || parse_bool(*lazy, "hint lazy");
  }
  // Every communicator keeps the caller's store, and its keys are its own: nothing depends on it.
  if (const auto text = take(hints, "persistent_store")) {
    (void)parse_bool(*text, "hint persistent_store");
  }
  warn_unknown_hints(hints, "gloo", {"hostname", "interface", "lazy", "persistent_store"});
  if (!address.hostname && !address.interface) {
    const Env env = Env::read();
    address.hostname = env.gloo_hostname();
    address.interface = env.gloo_interface();
  }
  TORCH_OVERLAP_CHECK(!address.hostname || !address.interface, kValue,
                      "gloo: expected a hostname or an interface to listen on, got both ('",
                      *address.hostname, "' and '", *address.interface, "')");
  return address;
}

GlooRequest make_request(const BackendContext& context) {
  GlooHints hints = read_hints(context.options.hints);
  return {.store = context.store,
          .rank = context.rank,
          .size = context.size,
          .timeout = context.options.timeout,
          .hostname = std::move(hints.hostname),
          .interface = std::move(hints.interface),
          .lazy = hints.lazy};
}

// Bounds all connections together: gloo applies its own timeout to each attempt to reach each rank.
c10::intrusive_ptr<c10d::Backend> connect(const BackendContext& context) {
  const auto group = std::make_shared<c10::intrusive_ptr<c10d::Backend>>();
  const auto make = [group, factory = require_factory(), request = make_request(context)] {
    *group = factory(request);
  };
  const Milliseconds timeout = context.options.timeout;
  TORCH_OVERLAP_CHECK(run_interruptibly(make, timeout), kTimeout,
                      "new_comm: expected gloo to connect ", context.size, " ranks within ",
                      timeout.count(), " ms, got no answer of one; look at the other ranks");
  TORCH_OVERLAP_CHECK(*group, kRuntime, "new_comm: expected a gloo process group, got none");
  return *group;
}

std::shared_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + context.options.timeout;
  auto group = connect(context);
  // A rank that has finished closes its connections, including those that a slower rank is still
  // establishing. No rank continues before all are connected.
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
  exchange(*context.store, "gloo connections", context.rank, context.size, "",
           std::max(left, Milliseconds(1)));
  return std::make_shared<HostBackend>(context, std::make_unique<GlooTransport>(std::move(group)),
                                       make_gloo_backend);
}

const BackendRegistration gloo_registration("gloo", {.make = make_gloo_backend,
                                                     .devices = {c10::kCPU, c10::kCUDA},
                                                     .check_hints = read_hints});

}  // namespace

void set_gloo_factory(GlooFactory factory) {
  GlooFactory old;  // destroyed without the lock
  std::lock_guard lock(holder().mutex);
  old = std::exchange(holder().factory, std::move(factory));
}

}  // namespace torch_overlap
