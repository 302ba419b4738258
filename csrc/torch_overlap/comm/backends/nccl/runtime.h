#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "torch_overlap/comm/backends/nccl/failure.h"
#include "torch_overlap/common/cuda/event.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/cuda/device_wait_monitor.h"

namespace torch_overlap {

// Sequences of operations that the device runs in the order of issue, each on its own streams: see
// backend.h.
enum class OpQueue : uint8_t { collectives, one_sided, waits };
inline constexpr size_t kNumOpQueues = 3;

// State that a communicator shares with its works, which may outlive it.
struct CommRuntime {
  CommRuntime(std::string name, c10::DeviceIndex device, size_t events)
      : name(std::move(name)), device(device), events(events) {
    stream(OpQueue::collectives, /*high_priority=*/false, /*capturing=*/false);
    stream(OpQueue::collectives, /*high_priority=*/true, /*capturing=*/false);
  }

  const std::string name;
  const c10::DeviceIndex device;
  Failure failure;
  cuda::EventPool events;

  // Returns the communicator's own stream for async operations of a queue, created when first
  // needed. Captures have others: a stream that joined a capture stays in it until that capture
  // ends, and an eager operation may be issued before. Requires the launch lock.
  c10::cuda::CUDAStream stream(OpQueue queue, bool high_priority, bool capturing) {
    auto& slot = streams_[4 * static_cast<size_t>(queue) + (capturing ? 2 : 0) + high_priority];
    if (!slot) slot.emplace(device, high_priority);
    return slot->get();
  }

  // Returns the monitor of the communicator's windows and custom collectives, created when first
  // needed. Requires the launch lock.
  cuda::DeviceWaitMonitor& wait_monitor() {
    if (owned_waits_ == nullptr) {
      owned_waits_ = std::make_unique<cuda::DeviceWaitMonitor>(device);
      waits_.store(owned_waits_.get(), std::memory_order_seq_cst);
      if (failure.is_set()) owned_waits_->stop();  // stop_waits() may have run just before
    }
    return *owned_waits_;
  }
  // A wait that expired becomes the communicator's failure. An operation that ended after it has
  // not succeeded. Thread-safe.
  void check_waits() {
    const auto* monitor = waits_.load(std::memory_order_acquire);
    if (monitor == nullptr || failure.is_set()) return;
    if (const auto expired = monitor->expired()) {
      failure.set(WorkStatus::TIMEDOUT,
                  std::make_exception_ptr(Error(ErrorKind::kTimeout, *expired)));
    }
  }
  // Returns the rank that a device-side wait misses, for the message of a late operation; empty if
  // none is known.
  std::string late_wait() const {
    const auto* monitor = waits_.load(std::memory_order_acquire);
    return monitor == nullptr ? std::string() : monitor->late();
  }
  void stop_waits() noexcept {
    if (auto* monitor = waits_.load(std::memory_order_seq_cst)) monitor->stop();
  }

 private:
  std::array<std::optional<cuda::OwnedStream>, 4 * kNumOpQueues> streams_;
  std::unique_ptr<cuda::DeviceWaitMonitor> owned_waits_;
  std::atomic<cuda::DeviceWaitMonitor*> waits_{nullptr};
};

}  // namespace torch_overlap
