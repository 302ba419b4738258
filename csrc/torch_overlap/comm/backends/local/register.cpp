#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/local/local_transport.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/host/host_backend.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

constexpr const char* kWorldKey = "local/world";

// The mailboxes that ranks of this process are about to share, by number. Rank 0 makes one and
// publishes "<process>:<number>" in the store; the others find it here. It stays until all have
// come, also when rank 0 is done and gone by then.
struct Worlds {
  struct World {
    std::shared_ptr<Mailbox> mailbox;
    int awaited;  // ranks
  };
  ForkSafeMutex mutex;
  std::map<std::string, World> open;
  uint64_t count = 0;
};

Worlds& worlds() { return ProcessWide<Worlds>::get(); }

std::shared_ptr<Mailbox> make_mailbox(const BackendContext& context) {
  auto mailbox = std::make_shared<Mailbox>(context.size);
  if (context.size == 1) return mailbox;
  std::string id;
  {
    std::lock_guard lock(worlds().mutex);
    id = concat(getpid(), ":", worlds().count++);
    worlds().open[id] = {mailbox, context.size - 1};
  }
  context.store->set(kWorldKey, std::vector<uint8_t>(id.begin(), id.end()));
  return mailbox;
}

std::shared_ptr<Mailbox> find_mailbox(const BackendContext& context) {
  const bool has_begun = in_store(concat("new_comm '", context.name, "'"), [&] {
    return poll(context.options.timeout, [&] { return context.store->check({kWorldKey}); });
  });
  TORCH_OVERLAP_CHECK(has_begun, kTimeout, "new_comm: expected rank 0 of '", context.name,
                      "' to begin, got nothing in ", context.options.timeout.count(), " ms");
  const auto bytes = context.store->get(kWorldKey);
  const std::string id(bytes.begin(), bytes.end());
  std::unique_lock lock(worlds().mutex);
  const auto found = worlds().open.find(id);
  TORCH_OVERLAP_CHECK(found != worlds().open.end(), kValue,
                      "new_comm: expected all ranks of 'local' in one process, got rank 0 in "
                      "process ",
                      split_string(id, ':').front(), " and rank ", context.rank, " in ", getpid(),
                      "; ranks that are processes use backend 'gloo'");
  auto mailbox = found->second.mailbox;
  const bool all_came = --found->second.awaited == 0;
  if (all_came) worlds().open.erase(found);
  lock.unlock();
  if (all_came) delete_keys(*context.store, {kWorldKey});
  return mailbox;
}

Faults find_faults(Hints hints) {
  Faults faults = Faults::take(hints);
  warn_unknown_hints(hints, "local", Faults::hints());
  return faults;
}

std::shared_ptr<Backend> make_local_backend(const BackendContext& context) {
  Faults faults = find_faults(context.options.hints);
  auto mailbox = context.rank == 0 ? make_mailbox(context) : find_mailbox(context);
  auto transport =
      std::make_unique<LocalTransport>(std::move(mailbox), context.rank, std::move(faults));
  return std::make_shared<HostBackend>(context, std::move(transport), make_local_backend);
}

const BackendRegistration local_registration("local", {.make = make_local_backend,
                                                       .devices = {c10::kCPU},
                                                       .check_hints = find_faults});

}  // namespace
}  // namespace torch_overlap
