#include "torch_overlap/base/interrupt.h"

#include <unistd.h>

#include <atomic>

namespace torch_overlap {
namespace {

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check = check; }

bool is_interruptible() noexcept { return interrupt_check != nullptr && gettid() == getpid(); }

void check_interrupt() {
  if (!is_interruptible()) return;
  // Used only by the one interruptible thread.
  static std::chrono::steady_clock::time_point last_check;
  const auto now = std::chrono::steady_clock::now();
  if (now - last_check < kInterruptPeriod / 2) return;
  last_check = now;
  interrupt_check.load()();
}

}  // namespace torch_overlap
