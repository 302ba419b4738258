#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

namespace torch_overlap::cuda {

// The two events of one operation: it may begin, it has ended. They do not measure time.
struct EventPair {
  cudaEvent_t ready = nullptr;
  cudaEvent_t end = nullptr;
};

// Events for one device, used again and again: making one costs microseconds, and destroying one
// can wait for the device. An event may be given back while streams still wait for it, because a
// wait is bound to what was recorded when it was called. Threads: any.
class EventPool {
 public:
  // Keeps at most `most` pairs that nobody uses.
  explicit EventPool(size_t most) : most_(most) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // The device must be current. Contents of the events are stale: record before use.
  EventPair take();
  void give(EventPair pair) noexcept;

 private:
  const size_t most_;
  std::mutex mutex_;
  std::vector<EventPair> free_;
};

inline constexpr size_t kDefaultEventPoolSize = 1000;

}  // namespace torch_overlap::cuda
