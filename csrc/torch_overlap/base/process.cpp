#include "torch_overlap/base/process.h"

#include <pthread.h>

#include <atomic>

namespace torch_overlap {
namespace {

// How many forks lie between this process and the one that loaded the library.
std::atomic<uint64_t> forks{0};

}  // namespace

ProcessStamp::ProcessStamp() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  forks_ = forks.load(std::memory_order_relaxed);
}

bool ProcessStamp::is_current() const noexcept {
  return forks_ == forks.load(std::memory_order_relaxed);
}

}  // namespace torch_overlap
