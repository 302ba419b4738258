#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "torch_overlap/comm/backends/nccl/failure.h"
#include "torch_overlap/common/cuda/event.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/cuda/wait_board.h"

namespace torch_overlap {

// What the device runs in the order of issue, each kind on streams of its own: see backend.h.
enum class Lane : uint8_t { collectives, one_sided, waits };
inline constexpr size_t kLanes = 3;

// What a communicator shares with its works, which may outlive it.
struct CommRuntime {
  CommRuntime(std::string name, c10::DeviceIndex device, size_t events)
      : name(std::move(name)), device(device), events(events) {
    stream(Lane::collectives, /*high_priority=*/false, /*capturing=*/false);
    stream(Lane::collectives, /*high_priority=*/true, /*capturing=*/false);
  }

  const std::string name;
  const c10::DeviceIndex device;
  Failure failure;
  cuda::EventPool events;

  // The communicator's own stream for async operations of a lane, made when first needed. Captures
  // get others: a stream that a capture took in stays in it until that capture ends, and an eager
  // operation may come before. Under the launch lock.
  c10::cuda::CUDAStream stream(Lane lane, bool high_priority, bool capturing) {
    auto& slot = streams_[4 * static_cast<size_t>(lane) + (capturing ? 2 : 0) + high_priority];
    if (!slot) slot.emplace(device, high_priority);
    return slot->get();
  }

  // Of the communicator's windows and direct collectives, made with the first of them. Under the
  // launch lock.
  cuda::WaitBoard& waits() {
    if (owned_waits_ == nullptr) {
      owned_waits_ = std::make_unique<cuda::WaitBoard>(device);
      waits_.store(owned_waits_.get(), std::memory_order_seq_cst);
      if (failure.is_set()) owned_waits_->stop();  // stop_waits() may have come just before
    }
    return *owned_waits_;
  }
  // A wait that expired is the communicator's failure. An operation that ended after it has not
  // ended well. Any thread.
  void check_waits() {
    const auto* board = waits_.load(std::memory_order_acquire);
    if (board == nullptr || failure.is_set()) return;
    if (const auto expired = board->expired()) {
      failure.set(WorkStatus::TIMEDOUT,
                  std::make_exception_ptr(Error(ErrorKind::kTimeout, *expired)));
    }
  }
  // Which rank a wait on the device misses, for the message of an operation that is late; empty if
  // none is known.
  std::string late_wait() const {
    const auto* board = waits_.load(std::memory_order_acquire);
    return board == nullptr ? std::string() : board->late();
  }
  void stop_waits() noexcept {
    if (auto* board = waits_.load(std::memory_order_seq_cst)) board->stop();
  }

 private:
  std::array<std::optional<cuda::OwnedStream>, 4 * kLanes> streams_;
  std::unique_ptr<cuda::WaitBoard> owned_waits_;
  std::atomic<cuda::WaitBoard*> waits_{nullptr};
};

}  // namespace torch_overlap
