#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

namespace torch_overlap {

// A timeout that can be added to a time point, or counted in nanoseconds, without an overflow.
inline std::chrono::milliseconds bounded_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(365 * 24));
}

// Runs `work` on a thread of its own and waits for it, at most `limit`. True: it ended; what it
// threw is thrown here. False: it goes on alone, and what it throws is lost. So `work` owns all it
// touches. For calls that can hang with no way to give them a timeout.
bool run_bounded(std::function<void()> work, std::chrono::milliseconds limit);
// The same where the caller may throw: a signal ends its wait (base/interrupt.h).
bool run_interruptibly(std::function<void()> work, std::chrono::milliseconds limit);

}  // namespace torch_overlap
