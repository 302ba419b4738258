#pragma once

#include <array>
#include <optional>
#include <string>

#include "torch_overlap/comm/backends/nccl/failure.h"
#include "torch_overlap/common/cuda/event.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap {

// What a communicator shares with its works, which may outlive it.
struct CommRuntime {
  CommRuntime(std::string name, c10::DeviceIndex device, size_t events)
      : name(std::move(name)), device(device), events(events) {
    streams_[0].emplace(device, /*high_priority=*/false);
    streams_[1].emplace(device, /*high_priority=*/true);
  }

  const std::string name;
  const c10::DeviceIndex device;
  Failure failure;
  cuda::EventPool events;

  // The communicator's own stream for async operations. Captures get streams of their own, made
  // when first needed: a stream that a capture took in stays in it until that capture ends, and an
  // eager operation may come before. Under the launch lock.
  c10::cuda::CUDAStream stream(bool high_priority, bool capturing) {
    auto& slot = streams_[(capturing ? 2 : 0) + (high_priority ? 1 : 0)];
    if (!slot) slot.emplace(device, high_priority);
    return slot->get();
  }

 private:
  std::array<std::optional<cuda::OwnedStream>, 4> streams_;
};

}  // namespace torch_overlap
