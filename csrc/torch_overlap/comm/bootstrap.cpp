#include "torch_overlap/comm/bootstrap.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
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

// Of the ranks whose part is not there, why one will not come; empty if none is known to have left.
std::string who_left(c10d::Store& store, const std::vector<std::string>& parts,
                     const ExchangeOwner& owner) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    // Asked before its part is looked for: it may have come, and then left.
    auto why = owner.why_left(static_cast<int>(rank));
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

  // With the lock. A fork shares no connection, and ends none: its parent's are left as they are.
  std::map<std::string, StorePtr>& by_address() {
    if (!stores->process.is_current()) stores = new Stores;
    return stores->by_address;
  }
};

// The TCPStore of this process for `address`, made once: communicators differ by their keys. Rank 0
// serves it, unless torchrun's agent does already. It is never closed: other ranks may still read
// when rank 0's last communicator is gone.
StorePtr process_store(const Env& env, RankAndSize who, Milliseconds timeout) {
  const auto host = env.master_addr();
  TORCH_OVERLAP_CHECK(host, kValue,
                      "new_comm: expected a store, or MASTER_ADDR in the environment, or a SLURM "
                      "node list, got none; start the script with torchrun or pass store=");
  auto& stores = ProcessWide<CurrentStores>::get();
  const int port = env.master_port();
  const std::string address = concat(*host, ":", port);
  {
    const std::lock_guard lock(stores.mutex);
    const auto& known = stores.by_address();
    if (const auto found = known.find(address); found != known.end()) return found->second;
  }
  // Outside the lock: a rank that connects must not keep rank 0, in another thread, from serving.
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
    (void)run_interruptibly(make, kLongestTimeout);  // it ends by its own timeout
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, "new_comm: expected a store at ", address, " within ",
         timeout.count(), " ms, got: ", what_happened(error),
         "; rank 0 or torchrun's agent serves it: does it run, and is MASTER_PORT free?");
  }
  const std::lock_guard lock(stores.mutex);
  return stores.by_address().try_emplace(address, std::move(*made)).first->second;
}

// How long a store has to connect before it is asked whether it is there at all.
constexpr Milliseconds kWatchPeriod{100};

// Another connection to a store, or why there is none. On threads of their own: it is tried for as
// long as the store's timeout, also where the store has ended, which the connection that is there
// tells at once; but that may be another thread's, who waits with it.
class Connection {
 public:
  explicit Connection(StorePtr store) : store_(std::move(store)) {}

  void make() {
    StorePtr made = store_;
    try {
      made = store_->clone();
    } catch (const std::exception&) {  // a store written in Python need not have clone()
    }
    const std::lock_guard lock(mutex_);
    made_ = std::move(made);
    changed_.notify_all();
  }

  // Until it is made, or the store has ended.
  void watch() {
    std::unique_lock lock(mutex_);
    do {
      lock.unlock();
      std::string ended;
      try {
        (void)store_->check({"torch_overlap"});
      } catch (const c10::DistNetworkError& error) {
        ended = what_happened(error);
      } catch (const std::exception&) {  // nor check()
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

RankAndSize who_am_i(const Env& env, std::optional<RankAndSize> given) {
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

StorePtr own_connection(const StorePtr& store, const std::string& op, Milliseconds timeout) {
  const auto connection = std::make_shared<Connection>(store);
  const auto deadline = Clock::now() + bounded_timeout(timeout);
  std::thread([connection] { connection->make(); }).detach();
  if (!connection->wait(std::min(deadline, Clock::now() + kWatchPeriod))) {
    std::thread([connection] { connection->watch(); }).detach();
    (void)connection->wait(deadline);
  }
  return connection->get(op, timeout);
}

c10::intrusive_ptr<c10d::Store> prefixed_store(const StorePtr& store, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// The name comes last and its length first.
std::string name_prefix(const Env& env, const std::string& what, const std::string& name) {
  return concat("torch_overlap/", env.run_id(), "/", env.restart_count(), "/", what, "/",
                name.size(), "/", name);
}

void delete_keys(c10d::Store& store, const std::vector<std::string>& keys) noexcept {
  try {
    for (const auto& key : keys) (void)store.deleteKey(key);
  } catch (const std::exception&) {  // they stay, as the contract says
  }
}

void done_with_keys(c10d::Store& store, const std::string& count, int readers,
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
  const auto keys = part_keys(key, size);
  put_part(store, keys[rank], mine);
  done_with_keys(store, readers_key(key), size, keys);
}

std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int size,
                                  const std::string& mine, Milliseconds timeout,
                                  const ExchangeOwner& owner) {
  return in_store(key, [&] {
    KeysThere parts(part_keys(key, size));
    put_part(store, parts.keys()[rank], mine);
    std::optional<std::vector<std::string>> all;
    std::string ended;
    std::string left;
    try {
      (void)poll(timeout, [&] {
        // A rank that gives up takes its part away, also while others read.
        if (parts.all(store)) all = get_parts(store, parts.keys());
        if (all) return true;
        if (owner.why_end) ended = owner.why_end();
        if (ended.empty() && owner.why_left) left = who_left(store, parts.keys(), owner);
        return !ended.empty() || !left.empty();
      });
    } catch (const Error&) {  // interrupted: as if its time were over
      delete_keys(store, {parts.keys()[rank]});
      if (owner.on_missing) (void)owner.on_missing(/*has_left=*/false);
      throw;
    }
    const auto read = [&] { done_with_keys(store, readers_key(key), size, parts.keys()); };
    if (all) {
      read();
      return *all;
    }
    const auto missing = parts.missing(store);
    if (!ended.empty() || !left.empty()) {
      // Its part stays: it may say why, and who comes later waits for this rank in what follows.
      read();
    } else {
      delete_keys(store, {parts.keys()[rank]});  // nobody may take this rank for present
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
  return own_connection(given ? given : process_store(env, who, timeout), op, timeout);
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
