#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/comm/call.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap {

// Counters with which replays report their progress to the host. Each pair, "started" and "ended",
// only grows; it is in device memory and is copied to mapped host memory. Shared by the graphs of
// one communicator. Thread-safe. Must be destroyed on a thread that may call CUDA (the deferred
// deleter's).
class ReplayCounterPool {
 public:
  struct ReplayCounters {
    uint32_t* started_counter;  // device memory
    uint32_t* ended_counter;
    uint32_t* started;  // host memory, at the same address on the device
    uint32_t* ended;
  };

  explicit ReplayCounterPool(c10::DeviceIndex device) : device_(device) {}
  ~ReplayCounterPool();
  ReplayCounterPool(const ReplayCounterPool&) = delete;
  ReplayCounterPool& operator=(const ReplayCounterPool&) = delete;

  // Returns counters that are zero, or equal. May allocate, also during a capture of this thread.
  ReplayCounters take();
  // Returns the counters of a destroyed graph. A replay that was stopped may have left them
  // unequal.
  void give(const ReplayCounters& mark);

 private:
  void grow();

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::vector<uint32_t*> blocks_;  // in pairs: device memory, then host memory
  std::vector<ReplayCounters> free_;
};

// Watches the operations that one graph captured on one communicator, at each replay. Every
// operation is accompanied by two one-thread kernels, leaves of the graph for which nothing waits:
// one counts when the operation can begin, the other when it has ended. An operation that has begun
// and not ended for longer than its timeout is late.
//
// The graph's GraphResources owns it. watch_begin(), watch_end() and check() require the launch
// lock.
class GraphMonitor {
 public:
  using Clock = std::chrono::steady_clock;

  // `graph` is the graph's number among those of the communicator.
  GraphMonitor(std::shared_ptr<ReplayCounterPool> pool, uint64_t graph)
      : pool_(std::move(pool)), graph_(graph) {}
  ~GraphMonitor();
  GraphMonitor(const GraphMonitor&) = delete;
  GraphMonitor& operator=(const GraphMonitor&) = delete;

  // Called while `call` is captured: watch_begin() before it, when `side` depends on everything
  // that the operation depends on; watch_end() after it, when `side` depends on its end.
  void watch_begin(const Call& call, cudaStream_t side);
  void watch_end(cudaStream_t side);
  // Removes the last operation, which was not captured after all.
  void drop_last();

  // Returns a message if an operation of a replay is late; names at most one.
  std::optional<std::string> check(Clock::time_point now);

 private:
  struct Entry {
    ReplayCounterPool::ReplayCounters mark;
    std::string what;
    std::chrono::milliseconds timeout;
    uint32_t started_before;  // value at capture: counters are reused
    uint32_t running = 0;     // replay that was seen to run
    Clock::time_point since{};
  };

  const std::shared_ptr<ReplayCounterPool> pool_;
  const uint64_t graph_;
  std::vector<Entry> entries_;
};

}  // namespace torch_overlap
