#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Handles signals, such as Ctrl-C, while a call blocks. A language that handles signals on the
// process's first thread, between two of its own instructions, cannot do so while that thread waits
// in the library. Its bindings therefore register a check, which the waits of that thread call
// periodically. A wait ends with the kInterrupted error that the check throws; the operation that
// was waited for continues. Other threads do not check.
using InterruptCheck = void (*)();
TORCH_OVERLAP_API void set_interrupt_check(InterruptCheck check);

constexpr std::chrono::milliseconds kInterruptPeriod{100};

// Returns true if the calling thread checks for signals.
TORCH_OVERLAP_API bool is_interruptible() noexcept;

// Checks for signals, unless it has just done so: for use in any loop. The caller must not hold a
// lock that Python code of a signal handler or of another thread may need.
TORCH_OVERLAP_API void check_interrupt();

// Calls condition.wait_until(), and checks for signals if the thread is interruptible. The lock is
// not held during a check, nor when the check throws.
template <typename TimePoint, typename Done>
bool wait_interruptibly(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                        TimePoint until, const Done& done) {
  if (!is_interruptible()) return condition.wait_until(lock, until, done);
  while (true) {
    const auto look = std::min(until, TimePoint::clock::now() + kInterruptPeriod);
    if (condition.wait_until(lock, look, done)) return true;
    if (look == until) return false;
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
}

}  // namespace torch_overlap
