#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How the ranks of a communicator learn of each other's failure, over its store. A rank that gives
// up stops its kernels, which on other ranks can look as if the operation had ended: what they wait
// for next would then start its clock anew. With this they hear of it instead.
//
// Nothing here waits: the store is asked on threads of its own, so that one which does not answer
// holds up nobody. Such a thread stays until the store's own timeout.
//
// Threads: any.
class TORCH_OVERLAP_API PeerFailure {
 public:
  using Clock = std::chrono::steady_clock;

  // `store`: the communicator's alone. Null: nobody is told and nobody is heard.
  PeerFailure(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Tells the others, unless it was they who told.
  void tell(const std::string& message) noexcept;
  // What a peer has told; empty as long as none is known to have. For a rank that has waited for
  // period() and still waits: asks the store, at most once in a period.
  std::optional<std::string> heard(Clock::time_point now) noexcept;
  // Grows with the group, so that a store is asked about a thousand times a second at most.
  std::chrono::milliseconds period() const { return period_; }

 private:
  struct Shared;
  const std::chrono::milliseconds period_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace torch_overlap
