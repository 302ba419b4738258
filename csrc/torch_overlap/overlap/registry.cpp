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

struct BufferRecord {
  std::weak_ptr<TorchComm> comm;
  const TorchComm* comm_address = nullptr;
  CommOverlapEntry entry;
  std::shared_ptr<CommOverlapCore> buffer;
};

// A buffer that a thread is creating. Other threads that request an equal one wait for it.
struct PendingBuffer {
  const TorchComm* comm_address;
  CommOverlapConfig config;
  std::shared_future<void> over;
  ProcessStamp process{};  // after a fork the child ignores entries of its parent
};

struct Buffers {
  ForkSafeMutex mutex;
  std::map<int64_t, BufferRecord> by_id;
  std::list<PendingBuffer> making;
  int64_t last = 0;
};

Buffers& buffers() { return LeakySingleton<Buffers>::get(); }

// True if the buffer belongs to the current members of its communicator.
bool is_active(const BufferRecord& held) {
  try {
    held.buffer->group().require_active("create_comm_overlap_buffer");
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Returns the entry of an equal, usable buffer. The lock must be held.
std::map<int64_t, BufferRecord>::iterator find_equal(const TorchComm& comm,
                                                     const CommOverlapConfig& config) {
  auto& all = buffers().by_id;
  return std::find_if(all.begin(), all.end(), [&](const auto& item) {
    const BufferRecord& held = item.second;
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
  std::list<PendingBuffer>::iterator mine;
  while (true) {
    std::shared_future<void> of_other;
    {
      const std::lock_guard lock(all.mutex);
      if (const auto found = find_equal(*comm, config); found != all.by_id.end()) {
        ++found->second.entry.holds;
        return found->first;
      }
      const auto other =
          std::find_if(all.making.begin(), all.making.end(), [&](const PendingBuffer& making) {
            return making.process.is_current() && making.comm_address == comm.get() &&
                   making.config == config;
          });
      if (other == all.making.end()) {
        mine = all.making.insert(
            other,
            {.comm_address = comm.get(), .config = config, .over = over.get_future().share()});
        break;
      }
      of_other = other->over;
    }
    of_other.wait();  // it may have failed: look again
  }
  std::shared_ptr<CommOverlapCore> buffer;
  std::exception_ptr error;
  try {
    // Without the lock: this waits for the other ranks, which may be threads of this process.
    buffer = CommOverlapCore::create(OverlapGroup::of(comm), config);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(all.mutex);
  all.making.erase(mine);
  over.set_value();
  if (error) std::rethrow_exception(error);
  const int64_t id = ++all.last;
  all.by_id.emplace(id, BufferRecord{.comm = comm,
                                     .comm_address = comm.get(),
                                     .entry = {comm->name(), config, 1},
                                     .buffer = std::move(buffer)});
  return id;
}

void destroy_comm_overlap_buffer(int64_t id) {
  std::shared_ptr<CommOverlapCore> last;  // destroyed after the lock is released
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
  std::map<int64_t, BufferRecord> all;
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
