#include "torch_overlap/comm/bootstrap.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <map>
#include <mutex>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// The TCPStore of this process for `address`, made once: communicators differ by their keys. Rank 0
// serves it, unless torchrun's agent does already. It is never closed: other ranks may still read
// when rank 0's last communicator is gone.
StorePtr process_store(const Env& env, RankAndSize who, Milliseconds timeout) {
  TORCH_OVERLAP_CHECK(env.master_addr, kValue,
                      "new_comm: expected a store, or MASTER_ADDR in the environment, or a SLURM "
                      "node list, got none; start the script with torchrun or pass store=");
  struct Stores {
    std::mutex mutex;
    std::map<std::string, StorePtr> by_address;
  };
  static auto* stores = new Stores;
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
  StorePtr store = c10::make_intrusive<c10d::TCPStore>(*env.master_addr, options);
  std::lock_guard lock(stores->mutex);
  return stores->by_address.try_emplace(address, std::move(store)).first->second;
}

// A connection of our own: a store's client serves one thread at a time, and a wait would keep
// every other communicator of the process from it. A store that cannot be cloned is used as it is.
StorePtr own_connection(const StorePtr& store) {
  try {
    if (StorePtr clone = store->clone()) return clone;
  } catch (const std::exception&) {  // a store written in Python need not have clone()
  }
  return store;
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

c10::intrusive_ptr<c10d::Store> prefixed_store(const StorePtr& store, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

void publish(c10d::Store& store, const std::string& key, int rank, const std::string& mine) {
  // A value must not be empty: some stores cannot tell that from a key that is not there.
  store.set(concat(key, "/", rank), to_bytes("=" + mine));
}

std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int size,
                                  const std::string& mine, Milliseconds timeout) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(concat(key, "/", r));
  publish(store, key, rank, mine);
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    for (int r = 0; r < size; ++r) {
      if (!store.check({keys[r]})) missing.push_back(r);
    }
    (void)store.deleteKey(keys[rank]);  // who comes later must not take this rank for present
    if (missing.empty()) fail(ErrorKind::kRuntime, key, ": the store failed: ", error.what());
    fail(ErrorKind::kTimeout, key, ": expected ", size, " ranks within ", timeout.count(),
         " ms, got none of ranks ", list_string(missing));
  }
  std::vector<std::string> all;
  for (const auto& name : keys) {
    const auto value = store.get(name);
    TORCH_OVERLAP_CHECK(!value.empty(), kRuntime, key, ": expected a value under ", name,
                        ", got an empty one");
    all.emplace_back(value.begin() + 1, value.end());
  }
  return all;
}

StorePtr rendezvous(const Env& env, const std::string& name, const std::string& digest,
                    Milliseconds timeout, StorePtr store, RankAndSize who) {
  if (!store) store = process_store(env, who, timeout);
  // The name comes last and its length first, so that no name can be taken for part of another key.
  auto common = prefixed_store(own_connection(store),
                               concat("torch_overlap/", env.run_id, "/", env.restart_count, "/",
                                      who.size, "/", name.size(), "/", name));
  const int64_t arrival = common->add("arrivals", 1) - 1;
  const int64_t generation = arrival / who.size;
  StorePtr mine_alone = prefixed_store(common, concat(generation));

  const auto mine = concat(digest, " size=", who.size);
  const auto all =
      exchange(*mine_alone, concat("new_comm '", name, "'"), who.rank, who.size, mine, timeout);
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
