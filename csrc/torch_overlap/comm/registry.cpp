#include "torch_overlap/comm/registry.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

struct OwnerThread {
  std::thread::id thread = std::this_thread::get_id();
  bool is_thread_rank;  // other ranks of this process may use the communicator's name

  bool is_other() const { return is_thread_rank && thread != std::this_thread::get_id(); }
};

struct Entry {
  std::weak_ptr<TorchComm> comm;
  const TorchComm* address;  // finds the entry of a communicator that is being destroyed
  OwnerThread owner;
  ProcessStamp process;  // a fork inherits its parent's entries, and may reuse their names
};

struct Finalized {
  std::string name;
  OwnerThread owner;
};

// Number of finalized names, the latest ones, that are distinguished from names that never existed.
constexpr size_t kMaxFinalizedNames = 1000;

struct Registry {
  ForkSafeMutex mutex;
  std::map<std::string, std::vector<Entry>, std::less<>> entries;
  std::deque<Finalized> finalized;

  bool was_finalized(const std::string& name) const {
    return std::any_of(finalized.begin(), finalized.end(), [&](const Finalized& one) {
      return one.name == name && !one.owner.is_other();
    });
  }
};

Registry& registry() { return LeakySingleton<Registry>::get(); }

thread_local const ActingRankGuard* innermost_guard = nullptr;

}  // namespace

ActingRankGuard::ActingRankGuard(std::shared_ptr<TorchComm> comm)
    : comm_(std::move(comm)), outer_(innermost_guard) {
  TORCH_OVERLAP_CHECK(comm_, kValue,
                      "ActingRankGuard: expected a communicator, got none. Make one with "
                      "TorchComm::create().");
  innermost_guard = this;
}

ActingRankGuard::~ActingRankGuard() { innermost_guard = outer_; }

std::shared_ptr<TorchComm> ActingRankGuard::find(const std::string& name) {
  const ActingRankGuard* guard = innermost_guard;
  while (guard != nullptr && guard->comm_->name() != name) guard = guard->outer_;
  return guard != nullptr ? guard->comm_ : nullptr;
}

std::shared_ptr<TorchComm> get_comm(const std::string& name) {
  if (auto acting = ActingRankGuard::find(name)) {
    TORCH_OVERLAP_CHECK(!acting->is_finalized(), kState,
                        "get_comm: expected a live communicator, got '", name,
                        "', which was finalized");
    return acting;
  }
  {
    std::shared_ptr<TorchComm> comm;  // a last reference is dropped after the lock
    std::lock_guard lock(registry().mutex);
    bool is_others = false;
    const auto found = registry().entries.find(name);
    if (found != registry().entries.end()) {
      const auto& entries = found->second;
      const auto mine = std::find_if(entries.begin(), entries.end(),
                                     [](const Entry& entry) { return !entry.owner.is_other(); });
      is_others = mine == entries.end();
      if (!is_others) comm = mine->comm.lock();
      if (comm) return comm;
    }
    TORCH_OVERLAP_CHECK(!registry().was_finalized(name), kState,
                        "get_comm: expected a live communicator, got '", name,
                        "', which was finalized");
    TORCH_OVERLAP_CHECK(!is_others, kValue, "get_comm: expected the thread that made '", name,
                        "', got another; ranks that are threads share a name, and each "
                        "thread finds its own communicator only, or that of its "
                        "ActingRankGuard");
  }
  fail(ErrorKind::kValue, "get_comm: expected the name of a live communicator, got '", name,
       "'; there are ", list_string(comm_names()));
}

std::vector<std::string> comm_names() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, entries] : registry().entries) names.push_back(name);
  return names;
}

std::vector<std::shared_ptr<TorchComm>> live_comms() {
  std::vector<std::shared_ptr<TorchComm>> comms;  // last references are dropped after the lock
  const std::lock_guard lock(registry().mutex);
  for (const auto& [name, entries] : registry().entries) {
    for (const Entry& entry : entries) {
      if (!entry.process.is_current()) continue;
      if (auto comm = entry.comm.lock()) comms.push_back(std::move(comm));
    }
  }
  return comms;
}

namespace detail {

void require_free_name(const std::string& name) {
  // Declared before the lock: if this holds the last reference to a communicator, the communicator
  // must be destroyed after the lock is released.
  std::vector<std::shared_ptr<TorchComm>> alive;
  std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(name);
  if (found == registry().entries.end()) return;
  // Two ranks of one process may share a name, but two communicators of one rank may not: an
  // operator that receives the name could not distinguish them.
  for (const Entry& entry : found->second) {
    if (entry.owner.is_other()) continue;
    if (!entry.process.is_current()) continue;
    alive.push_back(entry.comm.lock());
    TORCH_OVERLAP_CHECK(!alive.back(), kValue,
                        "new_comm: expected a name that no live communicator has, got '", name,
                        "'; finalize the other one first");
  }
}

void add_comm(const std::shared_ptr<TorchComm>& comm) {
  require_free_name(comm->name());
  const bool is_thread_rank =
      comm->backend_name() == "local" && (comm->size() > 1 || comm->options().enable_reconfigure);
  std::lock_guard lock(registry().mutex);
  auto& entries = registry().entries[comm->name()];
  std::erase_if(entries, [](const Entry& entry) { return !entry.process.is_current(); });
  entries.push_back({comm, comm.get(), OwnerThread{.is_thread_rank = is_thread_rank}, {}});
  std::erase_if(registry().finalized, [&](const Finalized& one) {
    return one.name == comm->name() && !one.owner.is_other();
  });
}

void remove_comm(const TorchComm* comm) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(comm->name());
  if (found == registry().entries.end()) return;
  std::erase_if(found->second, [comm](const Entry& entry) {
    if (entry.address != comm) return false;
    if (comm->is_finalized()) registry().finalized.push_back({comm->name(), entry.owner});
    return true;
  });
  if (registry().finalized.size() > kMaxFinalizedNames) registry().finalized.pop_front();
  if (found->second.empty()) registry().entries.erase(found);
}

}  // namespace detail
}  // namespace torch_overlap
