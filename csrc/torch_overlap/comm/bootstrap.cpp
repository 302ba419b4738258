#include "torch_overlap/comm/bootstrap.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/bounded.h"

namespace torch_overlap {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Without the backtrace that c10's errors carry.
std::string what_happened(const std::exception& error) {
  const auto* from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 != nullptr ? from_c10->what_without_backtrace() : error.what();
}

// Runs `body`; the store's own error becomes ours.
template <typename Body>
auto in_store(const std::string& key, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, key, ": expected the store to answer, got: ", what_happened(error),
         "; has the process that serves it ended?");
  }
}

std::string part_key(const std::string& key, int rank) { return concat(key, "/", rank); }

std::vector<std::string> part_keys(const std::string& key, int size) {
  std::vector<std::string> keys;
  keys.reserve(size);
  for (int r = 0; r < size; ++r) keys.push_back(part_key(key, r));
  return keys;
}

std::string readers_key(const std::string& key) { return key + "/read"; }

void put_part(c10d::Store& store, const std::string& key, int rank, const std::string& mine) {
  // A value must not be empty: some stores cannot tell that from a key that is not there.
  store.set(part_key(key, rank), to_bytes("=" + mine));
}

std::string size_key(int rank) { return concat("size/", rank); }

// The TCPStore of this process for `address`, made once: communicators differ by their keys. Rank 0
// serves it, unless torchrun's agent does already. It is never closed: other ranks may still read
// when rank 0's last communicator is gone.
StorePtr process_store(const Env& env, RankAndSize who, Milliseconds timeout) {
  TORCH_OVERLAP_CHECK(env.master_addr, kValue,
                      "new_comm: expected a store, or MASTER_ADDR in the environment, or a SLURM "
                      "node list, got none; start the script with torchrun or pass store=");
  struct Stores {
    ProcessStamp process;
    std::mutex mutex;
    std::map<std::string, StorePtr> by_address;
  };
  static auto* stores = new Stores;
  if (!stores->process.is_current()) stores = new Stores;  // a fork shares no connection
  const std::string address = concat(*env.master_addr, ":", env.master_port);
  {
    std::lock_guard lock(stores->mutex);
    if (const auto found = stores->by_address.find(address); found != stores->by_address.end()) {
      return found->second;
    }
  }
  // Outside the lock: a rank that connects must not keep rank 0, in another thread, from serving.
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = who.rank == 0 && !env.agent_store;
  options.waitWorkers = false;
  options.multiTenant = true;
  options.timeout = timeout;
  StorePtr store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(*env.master_addr, options);
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, "new_comm: expected a store at ", address, " within ",
         timeout.count(), " ms, got: ", what_happened(error),
         "; rank 0 or torchrun's agent serves it: does it run, and is MASTER_PORT free?");
  }
  std::lock_guard lock(stores->mutex);
  return stores->by_address.try_emplace(address, std::move(store)).first->second;
}

// What the ranks that came last with this name said about its size, where it is not ours.
std::string other_sizes(c10d::Store& sizes, RankAndSize who) {
  std::string text;
  for (int r = 0; r < who.size; ++r) {
    if (!sizes.check({size_key(r)})) continue;
    const auto bytes = sizes.get(size_key(r));
    const std::string size(bytes.begin(), bytes.end());
    if (size != concat(who.size)) text += concat("; rank ", r, " came with size ", size);
  }
  return text;
}

}  // namespace

RankAndSize who_am_i(const Env& env, std::optional<RankAndSize> given) {
  if (given) {
    TORCH_OVERLAP_CHECK(given->size > 0 && given->rank >= 0 && given->rank < given->size, kValue,
                        "new_comm: expected a rank in [0, size), got ", given->rank, " of ",
                        given->size);
    return *given;
  }
  TORCH_OVERLAP_CHECK(env.rank, kValue,
                      "new_comm: expected rank and size in the environment (torchrun's RANK and "
                      "WORLD_SIZE, MPI's, PMI's or SLURM's, or TORCHCOMM_RANK and TORCHCOMM_SIZE), "
                      "got none; start the script with torchrun");
  return {*env.rank, *env.size};
}

StorePtr own_connection(const StorePtr& store, const std::string& op, Milliseconds timeout) {
  const auto clone = std::make_shared<StorePtr>();
  // On a thread of its own: the store's own timeout for connecting may be much longer.
  const bool answered = run_bounded(
      [store, clone] {
        try {
          *clone = store->clone();
        } catch (const std::exception&) {  // a store written in Python need not have clone()
        }
      },
      timeout);
  TORCH_OVERLAP_CHECK(answered, kRuntime, op,
                      ": expected the store to answer, got no connection within ", timeout.count(),
                      " ms; has the process that serves it ended?");
  return *clone ? *clone : store;
}

c10::intrusive_ptr<c10d::Store> prefixed_store(const StorePtr& store, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
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
  put_part(store, key, rank, mine);
  done_with_keys(store, readers_key(key), size, part_keys(key, size));
}

// Whether all keys are there within the timeout. Asks now and again: Store::wait() would keep the
// connection from other threads of this process, and what they have to say may be what the missing
// ranks wait for.
bool await_keys(c10d::Store& store, const std::vector<std::string>& keys, Milliseconds timeout) {
  using std::chrono::microseconds;
  const auto begin = std::chrono::steady_clock::now();
  size_t next = 0;
  while (true) {
    for (; next < keys.size() && store.check({keys[next]}); ++next) {
      if (store.check(keys)) return true;
    }
    if (next == keys.size()) next = 0;  // a rank that was there has given up
    const auto waited =
        std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - begin);
    if (waited >= timeout) return false;
    const auto pause = std::clamp(waited / 8, microseconds(200), microseconds(100'000));
    std::this_thread::sleep_for(std::min(pause, microseconds(timeout) - waited));
  }
}

std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int size,
                                  const std::string& mine, Milliseconds timeout) {
  const auto keys = part_keys(key, size);
  in_store(key, [&] { put_part(store, key, rank, mine); });
  if (!in_store(key, [&] { return await_keys(store, keys, timeout); })) {
    std::vector<int> missing;
    in_store(key, [&] {
      for (int r = 0; r < size; ++r) {
        if (!store.check({keys[r]})) missing.push_back(r);
      }
      (void)store.deleteKey(keys[rank]);  // who comes later must not take this rank for present
    });
    fail(ErrorKind::kTimeout, key, ": expected ", size, " ranks within ", timeout.count(),
         " ms, got ", missing.empty() ? "the last too late" : "none of ranks ",
         missing.empty() ? "" : list_string(missing));
  }
  std::vector<std::string> all;
  for (const auto& name : keys) {
    const auto value = in_store(key, [&] { return store.get(name); });
    TORCH_OVERLAP_CHECK(!value.empty(), kRuntime, key, ": expected a value under ", name,
                        ", got an empty one");
    all.emplace_back(value.begin() + 1, value.end());
  }
  done_with_keys(store, readers_key(key), size, keys);
  return all;
}

StorePtr open_store(const Env& env, const StorePtr& given, RankAndSize who, const std::string& op,
                    Milliseconds timeout) {
  return own_connection(given ? given : process_store(env, who, timeout), op, timeout);
}

StorePtr rendezvous(const Env& env, const std::string& name, const std::string& digest,
                    Milliseconds timeout, StorePtr store, RankAndSize who) {
  const std::string what = concat("new_comm '", name, "'");
  store = open_store(env, store, who, what, timeout);
  // The name comes last and its length first, so that no name can be taken for part of another key.
  const auto place = [&](const auto& size) {
    return prefixed_store(store, concat("torch_overlap/", env.run_id, "/", env.restart_count, "/",
                                        size, "/", name.size(), "/", name));
  };
  // Ranks that do not agree on the size meet nobody: this is how they learn why.
  const auto sizes = place("sizes");
  const auto common = place(who.size);
  const int64_t arrival = in_store(what, [&] {
    sizes->set(size_key(who.rank), to_bytes(concat(who.size)));
    return common->add("arrivals", 1) - 1;
  });
  const int64_t generation = arrival / who.size;
  StorePtr mine_alone = prefixed_store(common, concat(generation));

  const auto mine = concat(digest, " size=", who.size);
  std::vector<std::string> all;
  try {
    all = exchange(*mine_alone, what, who.rank, who.size, mine, timeout);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    fail(ErrorKind::kTimeout, error.what(), other_sizes(*sizes, who));
  }
  for (int r = 0; r < who.size; ++r) {
    TORCH_OVERLAP_CHECK(all[r] == mine, kValue, "new_comm: expected the same request for '", name,
                        "' on all ranks, got '", mine, "' on rank ", who.rank, " and '", all[r],
                        "' on rank ", r);
  }
  return mine_alone;
}

c10::Device resolve_device(c10::Device device, const Env& env, int rank) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  TORCH_OVERLAP_CHECK(c10::impl::hasDeviceGuardImpl(device.type()), kType,
                      "new_comm: expected a device that this PyTorch supports, got ", device);
  const auto* devices = c10::impl::getDeviceGuardImpl(device.type());
  const int count = devices->deviceCount();
  TORCH_OVERLAP_CHECK(count > 0, kType, "new_comm: expected a machine with a ", device.type(),
                      " device, got none");
  const int index = device.has_index() ? device.index() : env.local_rank.value_or(rank) % count;
  TORCH_OVERLAP_CHECK(index < count, kValue, "new_comm: expected a device index below ", count,
                      ", got ", device);
  const c10::Device resolved(device.type(), static_cast<c10::DeviceIndex>(index));
  devices->setDevice(resolved);
  return resolved;
}

}  // namespace torch_overlap
