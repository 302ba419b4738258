#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Propagates failures between the ranks of a communicator, over its store. A rank that gives up
// stops its kernels, which on other ranks can look as if the operation had ended: their next wait
// would then restart its timeout. With this class they learn of the failure instead. A communicator
// with a failed rank is unusable, even if single operations could still succeed.
//
// The store is accessed on separate threads, over separate connections, so that an unresponsive
// store blocks no caller. Such a thread ends when the store answers, or when its client times out.
//
// Threads: any.
class TORCH_OVERLAP_API PeerFailure {
 public:
  using Clock = std::chrono::steady_clock;

  // `store` is exclusive to the communicator. If it is null or cannot be cloned, no peer is
  // notified and no peer's failure is found.
  PeerFailure(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Publishes a failure, unless a rank has done so before. Waits at most `limit` until the store
  // has it; after that it continues in the background.
  void publish(const std::string& message,
               std::chrono::milliseconds limit = std::chrono::milliseconds(0)) noexcept;
  // Returns the failure that a peer published; empty if none is known. `begin` is the time since
  // which this rank has been waiting. Queries the store after a wait of period(), then each time
  // the wait has doubled, and at least every five seconds.
  std::optional<std::string> peer_error(Clock::time_point begin, Clock::time_point now) noexcept;
  // The period grows with the size of the group.
  std::chrono::milliseconds period() const { return period_; }

 private:
  struct Shared;
  const std::chrono::milliseconds period_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace torch_overlap
