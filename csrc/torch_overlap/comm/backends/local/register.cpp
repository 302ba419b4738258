#include <unistd.h>

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

// Mailboxes that ranks of this process have yet to open, by id. Rank 0 creates a mailbox and
// publishes "<process>:<number>" in the store; the other ranks find it here. It stays until all
// ranks have opened it, even if rank 0 has already finished.
struct Worlds {
  struct World {
    std::shared_ptr<Mailbox> mailbox;
    int num_awaited;  // ranks that have not opened it
  };
  ForkSafeMutex mutex;
  std::map<std::string, World> open;
  uint64_t count = 0;
};

Worlds& worlds() { return LeakySingleton<Worlds>::get(); }

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
  const bool has_begun = with_store_errors(concat("new_comm '", context.name, "'"), [&] {
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
  const bool have_all_arrived = --found->second.num_awaited == 0;
  if (have_all_arrived) worlds().open.erase(found);
  lock.unlock();
  if (have_all_arrived) delete_keys(*context.store, {kWorldKey});
  return mailbox;
}

Faults parse_faults(Hints hints) {
  Faults faults = Faults::take(hints);
  warn_unknown_hints(hints, "local", Faults::hints());
  return faults;
}

std::shared_ptr<Backend> make_local_backend(const BackendContext& context) {
  Faults faults = parse_faults(context.options.hints);
  auto mailbox = context.rank == 0 ? make_mailbox(context) : find_mailbox(context);
  auto transport =
      std::make_unique<LocalTransport>(std::move(mailbox), context.rank, std::move(faults));
  return std::make_shared<HostBackend>(context, std::move(transport), make_local_backend);
}

const BackendRegistration local_registration("local", {.make = make_local_backend,
                                                       .devices = {c10::kCPU},
                                                       .check_hints = parse_faults});

}  // namespace
}  // namespace torch_overlap
