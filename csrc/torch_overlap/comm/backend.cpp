#include "torch_overlap/comm/backend.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/rms_norm.h"
#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap {
namespace {

struct Registry {
  ForkSafeMutex mutex;
  std::map<std::string, BackendEntry> entries;
};

Registry& registry() { return LeakySingleton<Registry>::get(); }

}  // namespace

std::shared_ptr<Backend> Backend::regroup(const std::function<RegroupRequest()>& rendezvous,
                                          Milliseconds timeout) {
  fail(ErrorKind::kUnsupported,
       "reconfigure: expected a backend whose members can change, got one that cannot; make a new "
       "communicator");
}

void Backend::run_rms_norm(const Call& call) { add_rms_norm(call.tensor, *call.norm); }

std::shared_ptr<RemoteAccess> Backend::open_remote(Bootstrap& bootstrap, std::string_view op,
                                                   SymmetricMemory& memory) {
  fail(ErrorKind::kUnsupported, op,
       ": expected a backend that writes to memory it cannot map, got one that does not");
}

void Backend::abort_within(Milliseconds limit) {
  const auto task = std::make_shared<BackgroundTask>();
  const auto end = [self = shared_from_this(), task]() mutable {
    auto backend = std::move(self);  // released before the task ends
    backend->abort();
    drop_or_leak(std::move(backend));
  };
  if (run_with_timeout(end, limit)) return;
  TORCH_WARN("reconfigure: expected the abort of what was under way to end within ", limit.count(),
             " ms, got no end; it goes on in the background");
}

void register_backend(const std::string& name, BackendEntry entry) {
  const std::lock_guard lock(registry().mutex);
  // The old entry may hold Python objects: it is destroyed after the lock is released.
  std::swap(registry().entries[name], entry);
}

std::optional<BackendEntry> find_backend(const std::string& name) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(name);
  if (found == registry().entries.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> registered_backends() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, entry] : registry().entries) names.push_back(name);
  return names;
}

}  // namespace torch_overlap
