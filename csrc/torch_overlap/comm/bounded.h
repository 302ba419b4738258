#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

namespace torch_overlap {

// Returns a timeout that can be added to a time point, or converted to nanoseconds, without
// overflow.
inline std::chrono::milliseconds clamp_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(365 * 24));
}

// Runs `work` on a separate thread and waits for it, at most `limit`. Returns true if it ended, and
// rethrows what it threw. Returns false if it did not: it continues detached, and what it throws is
// lost, so `work` must own everything that it accesses. For calls that can hang and have no
// timeout.
bool run_with_timeout(std::function<void()> work, std::chrono::milliseconds limit);
// Same as run_with_timeout(), for callers that may throw: a signal interrupts the wait
// (base/interrupt.h).
bool run_interruptibly(std::function<void()> work, std::chrono::milliseconds limit);

}  // namespace torch_overlap
