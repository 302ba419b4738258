#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Signals, such as Ctrl-C, while a call blocks. A language that handles them on the process's first
// thread, between two of its own instructions, cannot while that thread waits in here. So its
// bindings name a check, which the waits of that thread call now and again: they end with the
// kInterrupted error that it throws. What was waited for goes on. Other threads do not look.
using InterruptCheck = void (*)();
TORCH_OVERLAP_API void set_interrupt_check(InterruptCheck check);

constexpr std::chrono::milliseconds kInterruptPeriod{100};

// Whether the calling thread looks for signals.
TORCH_OVERLAP_API bool is_interruptible() noexcept;

// Looks, unless it did so a moment ago: for any loop. The caller holds no lock that Python code, a
// signal's handler or another thread's, may need.
TORCH_OVERLAP_API void check_interrupt();

// condition.wait_until() of a thread that looks. The lock is not held meanwhile, nor when it
// throws.
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
