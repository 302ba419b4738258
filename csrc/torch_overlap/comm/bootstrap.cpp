#include "torch_overlap/comm/bootstrap.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string readers_key(const std::string& key) { return key + "/read"; }

// Returns why one of the ranks whose part is missing will not arrive; empty if none is known to
// have left.
std::string find_departed(c10d::Store& store, const std::vector<std::string>& parts,
                          const ExchangeCallbacks& owner) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    // Check for departure before the part: the rank may have published its part and then left.
    auto why = owner.departure_reason(static_cast<int>(rank));
    if (!why.empty() && !store.check({parts[rank]})) return why;
  }
  return {};
}

struct Stores {
  ProcessStamp process;
  std::map<std::string, StorePtr> by_address;
};

struct CurrentStores {
  ForkSafeMutex mutex;
  Stores* stores = new Stores;

  // Must be called with the lock held. A fork neither shares nor closes connections: its parent's
  // are left as they are.
  std::map<std::string, StorePtr>& by_address() {
    if (!stores->process.is_current()) stores = new Stores;
    return stores->by_address;
  }
};

// Returns the TCPStore of this process for `address`, made once: communicators use different keys.
// Rank 0 serves it, unless torchrun's agent does already. It is never closed: other ranks may still
// read after rank 0's last communicator is destroyed.
StorePtr process_store(const Env& env, RankAndSize who, Milliseconds timeout) {
  const auto host = env.master_addr();
  TORCH_OVERLAP_CHECK(host, kValue,
                      "new_comm: expected a store, or MASTER_ADDR in the environment, or a SLURM "
                      "node list, got none; start the script with torchrun or pass store=");
  auto& stores = LeakySingleton<CurrentStores>::get();
  const int port = env.master_port();
  const std::string address = concat(*host, ":", port);
  {
    const std::lock_guard lock(stores.mutex);
    const auto& known = stores.by_address();
    if (const auto found = known.find(address); found != known.end()) return found->second;
  }
  // Connect without the lock: a rank that connects must not block rank 0, in another thread, from
  // serving.
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = who.rank == 0 && !env.agent_store();
  options.waitWorkers = false;
  options.multiTenant = true;
  options.timeout = timeout;
  const auto made = std::make_shared<StorePtr>();
  const auto make = [made, host = *host, options] {
    *made = c10::make_intrusive<c10d::TCPStore>(host, options);
  };
  try {
    (void)run_interruptibly(make, kMaxTimeout);  // the TCPStore has its own timeout
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, "new_comm: expected a store at ", address, " within ",
         timeout.count(), " ms, got: ", error_message(error),
         "; rank 0 or torchrun's agent serves it: does it run, and is MASTER_PORT free?");
  }
  const std::lock_guard lock(stores.mutex);
  return stores.by_address().try_emplace(address, std::move(*made)).first->second;
}

// Time that a clone may take before watch() starts to check that the store has not ended, and the
// period of those checks.
constexpr Milliseconds kWatchPeriod{100};

// Opens another connection to a store, or finds out why it cannot. make() and watch() run on
// separate threads: clone() tries for as long as the store's timeout, even if the store has ended.
// The existing connection reports that at once, but another thread may be using it, and the caller
// would wait with that thread.
class Connection {
 public:
  explicit Connection(StorePtr store) : store_(std::move(store)) {}

  void make() {
    StorePtr made = store_;
    try {
      made = store_->clone();
    } catch (const std::exception&) {  // a store written in Python may lack clone()
    }
    const std::lock_guard lock(mutex_);
    made_ = std::move(made);
    changed_.notify_all();
  }

  // Polls until the connection is made, or the store has ended.
  void watch() {
    std::unique_lock lock(mutex_);
    do {
      lock.unlock();
      std::string ended;
      try {
        (void)store_->check({"torch_overlap"});
      } catch (const c10::DistNetworkError& error) {
        ended = error_message(error);
      } catch (const std::exception&) {  // it may lack check() too
      }
      lock.lock();
      ended_ = std::move(ended);
      changed_.notify_all();
    } while (!changed_.wait_for(lock, kWatchPeriod, [this] { return is_over(); }));
  }

  bool wait(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    return wait_interruptibly(changed_, lock, until, [this] { return is_over(); });
  }

  StorePtr get(const std::string& op, Milliseconds timeout) {
    const std::lock_guard lock(mutex_);
    TORCH_OVERLAP_CHECK(made_, kRuntime, op, ": expected the store to answer, got",
                        ended_.empty() ? concat(" no connection within ", timeout.count(), " ms")
                                       : concat(": ", ended_),
                        "; has the process that serves it ended?");
    return made_;
  }

 private:
  bool is_over() const { return made_ || !ended_.empty(); }

  const StorePtr store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  StorePtr made_;
  std::string ended_;
};

}  // namespace

RankAndSize resolve_rank_and_size(const Env& env, std::optional<RankAndSize> given) {
  if (given) {
    TORCH_OVERLAP_CHECK(given->size > 0 && given->rank >= 0 && given->rank < given->size, kValue,
                        "new_comm: expected a rank in [0, size), got ", given->rank, " of ",
                        given->size);
    return *given;
  }
  const auto launcher = env.launcher();
  TORCH_OVERLAP_CHECK(launcher, kValue,
                      "new_comm: expected rank and size in the environment (torchrun's RANK and "
                      "WORLD_SIZE, MPI's, PMI's or SLURM's, or TORCHCOMM_RANK and TORCHCOMM_SIZE), "
                      "got none; start the script with torchrun");
  return {launcher->rank, launcher->size};
}

StorePtr clone_store(const StorePtr& store, const std::string& op, Milliseconds timeout) {
  const auto connection = std::make_shared<Connection>(store);
  const auto deadline = Clock::now() + clamp_timeout(timeout);
  std::thread([connection] { connection->make(); }).detach();
  if (!connection->wait(std::min(deadline, Clock::now() + kWatchPeriod))) {
    std::thread([connection] { connection->watch(); }).detach();
    (void)connection->wait(deadline);
  }
  return connection->get(op, timeout);
}

c10::intrusive_ptr<c10d::Store> make_prefix_store(const StorePtr& store,
                                                  const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// The name comes last, after its length, so that no name can be read as part of another key.
std::string name_prefix(const Env& env, const std::string& what, const std::string& name) {
  return concat("torch_overlap/", env.run_id(), "/", env.restart_count(), "/", what, "/",
                name.size(), "/", name);
}

void delete_keys(c10d::Store& store, const std::vector<std::string>& keys) noexcept {
  try {
    for (const auto& key : keys) (void)store.deleteKey(key);
  } catch (const std::exception&) {  // the keys stay, as documented
  }
}

void release_keys(c10d::Store& store, const std::string& count, int readers,
                  const std::vector<std::string>& keys) noexcept {
  try {
    if (store.add(count, 1) < readers) return;
  } catch (const std::exception&) {
    return;
  }
  delete_keys(store, keys);
  delete_keys(store, {count});
}

void publish(c10d::Store& store, const std::string& key, int rank, int size,
             const std::string& mine) {
  const auto keys = rank_keys(key, size);
  set_part(store, keys[rank], mine);
  release_keys(store, readers_key(key), size, keys);
}

std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int size,
                                  const std::string& mine, Milliseconds timeout,
                                  const ExchangeCallbacks& owner) {
  return with_store_errors(key, [&] {
    StoreKeys parts(rank_keys(key, size));
    set_part(store, parts.keys()[rank], mine);
    std::optional<std::vector<std::string>> all;
    std::string ended;
    std::string left;
    try {
      (void)poll(timeout, [&] {
        // A rank that gives up deletes its part, even while others read.
        if (parts.all(store)) all = try_get_all(store, parts.keys());
        if (all) return true;
        if (owner.abort_reason) ended = owner.abort_reason();
        if (ended.empty() && owner.departure_reason)
          left = find_departed(store, parts.keys(), owner);
        return !ended.empty() || !left.empty();
      });
    } catch (const Error&) {  // interrupted: treat as a timeout
      delete_keys(store, {parts.keys()[rank]});
      if (owner.on_missing) (void)owner.on_missing(/*has_left=*/false);
      throw;
    }
    const auto read = [&] { release_keys(store, readers_key(key), size, parts.keys()); };
    if (all) {
      read();
      return *all;
    }
    const auto missing = parts.missing(store);
    if (!ended.empty() || !left.empty()) {
      // This rank's part stays: it may contain the reason, and a late rank will wait for this rank
      // in a later step.
      read();
    } else {
      delete_keys(store, {parts.keys()[rank]});  // no rank may assume that this rank is present
    }
    TORCH_OVERLAP_CHECK(ended.empty(), kState, key, ": expected ", size,
                        " ranks, got none of ranks ", list_string(missing),
                        " before the end: ", ended);
    const std::string said = owner.on_missing ? owner.on_missing(!left.empty()) : "";
    TORCH_OVERLAP_CHECK(left.empty(), kRuntime, key, ": expected ", size, " ranks, but ", left,
                        said);
    fail(ErrorKind::kTimeout, key, ": expected ", size, " ranks within ", timeout.count(),
         " ms, got ", missing.empty() ? "the last too late" : "none of ranks ",
         missing.empty() ? "" : list_string(missing), said);
  });
}

StorePtr open_store(const Env& env, const StorePtr& given, RankAndSize who, const std::string& op,
                    Milliseconds timeout) {
  return clone_store(given ? given : process_store(env, who, timeout), op, timeout);
}

c10::Device resolve_device(c10::Device device, const Env& env, int rank) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  TORCH_OVERLAP_CHECK(c10::impl::hasDeviceGuardImpl(device.type()), kType,
                      "new_comm: expected a device that this PyTorch supports, got ", device);
  const auto* devices = c10::impl::getDeviceGuardImpl(device.type());
  const int count = devices->deviceCount();
  TORCH_OVERLAP_CHECK(count > 0, kType, "new_comm: expected a machine with a ", device.type(),
                      " device, got none");
  int index = device.index();
  if (!device.has_index()) {
    const auto launcher = env.launcher_if_valid();
    index = (launcher ? launcher->local_rank.value_or(rank) : rank) % count;
  }
  TORCH_OVERLAP_CHECK(index < count, kValue, "new_comm: expected a device index below ", count,
                      ", got ", device);
  const c10::Device resolved(device.type(), static_cast<c10::DeviceIndex>(index));
  devices->setDevice(resolved);
  return resolved;
}

}  // namespace torch_overlap
