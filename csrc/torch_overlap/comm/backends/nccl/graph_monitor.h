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

// Where replays tell the host how far they are: pairs of counters that only grow, "begun" and
// "ended", in device memory, each shown in mapped host memory. Shared by the graphs of one
// communicator. Threads: any. Destroyed where CUDA may be called (the graveyard).
class MarkPool {
 public:
  struct Mark {
    uint32_t* begun_counter;  // device
    uint32_t* ended_counter;
    uint32_t* begun;  // host, and at the same address on the device
    uint32_t* ended;
  };

  explicit MarkPool(c10::DeviceIndex device) : device_(device) {}
  ~MarkPool();
  MarkPool(const MarkPool&) = delete;
  MarkPool& operator=(const MarkPool&) = delete;

  // Both counters are zero, or equal. May allocate, also during a capture of this thread.
  Mark take();
  // Of a graph that is gone. A replay that was stopped may have left the two counters apart.
  void give(const Mark& mark);

 private:
  void grow();

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::vector<uint32_t*> blocks_;  // each on the device and on the host, one behind the other
  std::vector<Mark> free_;
};

// Watches the operations that one graph captured on one communicator, at each replay. Beside every
// operation stand two one-thread kernels as leaves of the graph, which nothing waits for: one
// counts when the operation can begin, the other when it has ended. An operation that has begun and
// not ended for longer than its timeout is late.
//
// The graph's GraphHold owns it. Threads: the launch lock is held for watch_begin, watch_end and
// check.
class GraphMonitor {
 public:
  using Clock = std::chrono::steady_clock;

  // `graph`: counts the graphs of the communicator.
  GraphMonitor(std::shared_ptr<MarkPool> pool, uint64_t graph)
      : pool_(std::move(pool)), graph_(graph) {}
  ~GraphMonitor();
  GraphMonitor(const GraphMonitor&) = delete;
  GraphMonitor& operator=(const GraphMonitor&) = delete;

  // While `call` is captured: before it, when `side` depends on all that the operation depends on,
  // and after it, when `side` depends on its end.
  void watch_begin(const Call& call, cudaStream_t side);
  void watch_end(cudaStream_t side);
  // The operation was not captured after all.
  void forget_last();

  // Says which operation of which replay is late; at most one.
  std::optional<std::string> check(Clock::time_point now);

 private:
  struct Entry {
    MarkPool::Mark mark;
    std::string what;
    std::chrono::milliseconds timeout;
    uint32_t begun_before;  // what a mark that was used before starts from
    uint32_t running = 0;   // the replay that was seen to run, and since when
    Clock::time_point since{};
  };

  const std::shared_ptr<MarkPool> pool_;
  const uint64_t graph_;
  std::vector<Entry> entries_;
};

}  // namespace torch_overlap
