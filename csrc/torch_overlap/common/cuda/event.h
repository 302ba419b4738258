#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

namespace torch_overlap::cuda {

// The two events of one operation: it may begin, and it has ended. They do not measure time.
struct EventPair {
  cudaEvent_t ready = nullptr;
  cudaEvent_t end = nullptr;
};

// Events of one device for reuse: creating one is slow, and destroying one can wait for the device.
// An event may be released while streams still wait for it, because a wait refers to the work that
// was recorded when the wait was called. Threads: any.
class EventPool {
 public:
  // Keeps at most `max_free` unused pairs.
  explicit EventPool(size_t max_free) : max_free_(max_free) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // The device must be current. The events are stale: record them before use.
  EventPair acquire();
  void release(EventPair pair) noexcept;

 private:
  const size_t max_free_;
  std::mutex mutex_;
  std::vector<EventPair> free_;
};

inline constexpr size_t kDefaultEventPoolSize = 1000;

}  // namespace torch_overlap::cuda
