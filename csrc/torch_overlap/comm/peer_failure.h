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
// for next would then start its clock anew. With this they hear of it instead. A communicator with
// a rank that has failed is dead, whatever single operations could still do.
//
// The store is asked on threads of their own, over connections of their own, so that one which does
// not answer holds up nobody. Such a thread ends when the store answers, or its client gives up.
//
// Threads: any.
class TORCH_OVERLAP_API PeerFailure {
 public:
  using Clock = std::chrono::steady_clock;

  // `store`: the communicator's alone. Null, or one that cannot be cloned: nobody is told and
  // nobody is heard.
  PeerFailure(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Tells the others, unless somebody has before. Waits for at most `limit` until the store has it;
  // it goes on alone then.
  void tell(const std::string& message,
            std::chrono::milliseconds limit = std::chrono::milliseconds(0)) noexcept;
  // What a peer has told; empty as long as none is known to have. For a rank that has been waiting
  // since `begin`. Asks the store once it has waited for period(), then when it has waited for
  // twice as long, and so on, at least every five seconds.
  std::optional<std::string> heard(Clock::time_point begin, Clock::time_point now) noexcept;
  // Grows with the group.
  std::chrono::milliseconds period() const { return period_; }

 private:
  struct Shared;
  const std::chrono::milliseconds period_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace torch_overlap
