#include "torch_overlap/overlap/registry.h"

#include <algorithm>
#include <exception>
#include <future>
#include <list>
#include <mutex>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap {
namespace {

struct Held {
  std::weak_ptr<TorchComm> comm;
  const TorchComm* comm_address = nullptr;
  CommOverlapEntry entry;
  std::shared_ptr<CommOverlapCore> buffer;
};

// A buffer that a thread is making: others that want the same wait for it.
struct Making {
  const TorchComm* comm_address;
  CommOverlapConfig config;
  std::shared_future<void> over;
  ProcessStamp process;  // nobody goes on with what a fork's parent was making
};

struct Buffers {
  ForkSafeMutex mutex;
  std::map<int64_t, Held> by_id;
  std::list<Making> making;
  int64_t last = 0;
};

Buffers& buffers() { return ProcessWide<Buffers>::get(); }

// Whether the buffer is of the members that its communicator has now.
bool is_active(const Held& held) {
  try {
    held.buffer->group().require_active("create_comm_overlap_buffer");
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The entry of an equal buffer that can be used; with the lock.
std::map<int64_t, Held>::iterator find_equal(const TorchComm& comm,
                                             const CommOverlapConfig& config) {
  auto& all = buffers().by_id;
  return std::find_if(all.begin(), all.end(), [&](const auto& item) {
    const Held& held = item.second;
    return held.comm_address == &comm && !held.comm.expired() && held.entry.config == config &&
           is_active(held);
  });
}

}  // namespace

int64_t create_comm_overlap_buffer(const std::shared_ptr<TorchComm>& comm,
                                   const CommOverlapConfig& config) {
  comm->require_own_process("create_comm_overlap_buffer");
  Buffers& all = buffers();
  std::promise<void> over;
  std::list<Making>::iterator mine;
  while (true) {
    std::shared_future<void> of_other;
    {
      const std::lock_guard lock(all.mutex);
      if (const auto found = find_equal(*comm, config); found != all.by_id.end()) {
        ++found->second.entry.holds;
        return found->first;
      }
      const auto other =
          std::find_if(all.making.begin(), all.making.end(), [&](const Making& making) {
            return making.process.is_current() && making.comm_address == comm.get() &&
                   making.config == config;
          });
      if (other == all.making.end()) {
        mine = all.making.insert(other, {.comm_address = comm.get(),
                                         .config = config,
                                         .over = over.get_future().share(),
                                         .process = {}});
        break;
      }
      of_other = other->over;
    }
    of_other.wait();  // it may have failed: look again
  }
  std::shared_ptr<CommOverlapCore> buffer;
  std::exception_ptr error;
  try {
    // Without the lock: it waits for the other ranks, which may be threads of this process.
    buffer = CommOverlapCore::create(OverlapGroup::of(comm), config);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(all.mutex);
  all.making.erase(mine);
  over.set_value();
  if (error) std::rethrow_exception(error);
  const int64_t id = ++all.last;
  all.by_id.emplace(id, Held{.comm = comm,
                             .comm_address = comm.get(),
                             .entry = {comm->name(), config, 1},
                             .buffer = std::move(buffer)});
  return id;
}

void destroy_comm_overlap_buffer(int64_t id) {
  std::shared_ptr<CommOverlapCore> last;  // ends after the lock
  const std::lock_guard lock(buffers().mutex);
  const auto found = buffers().by_id.find(id);
  TORCH_OVERLAP_CHECK(
      found != buffers().by_id.end(), kValue,
      "destroy_comm_overlap_buffer: expected the id of a live buffer, got ", id,
      id > 0 && id <= buffers().last ? ", which was destroyed" : ", which no buffer ever had",
      ". comm_overlap_buffers() lists the live ones.");
  if (--found->second.entry.holds > 0) return;
  last = std::move(found->second.buffer);
  buffers().by_id.erase(found);
}

void destroy_all_comm_overlap_buffers() {
  std::map<int64_t, Held> all;
  {
    const std::lock_guard lock(buffers().mutex);
    all.swap(buffers().by_id);
  }
  while (!all.empty()) all.erase(std::prev(all.end()));
}

std::shared_ptr<CommOverlapCore> find_comm_overlap_buffer(std::string_view op, int64_t id) {
  const std::lock_guard lock(buffers().mutex);
  const auto found = buffers().by_id.find(id);
  TORCH_OVERLAP_CHECK(found != buffers().by_id.end(), kValue, op,
                      ": expected comm_overlap_id to be the id of a live buffer, got ", id,
                      id > 0 && id <= buffers().last
                          ? ", which was destroyed"
                          : "; make one with create_comm_overlap_buffer()");
  return found->second.buffer;
}

std::map<int64_t, CommOverlapEntry> comm_overlap_buffers() {
  std::map<int64_t, CommOverlapEntry> entries;
  const std::lock_guard lock(buffers().mutex);
  for (const auto& [id, held] : buffers().by_id) entries.emplace(id, held.entry);
  return entries;
}

}  // namespace torch_overlap
