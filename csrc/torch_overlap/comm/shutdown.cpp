#include "torch_overlap/comm/shutdown.h"

#include <atomic>
#include <chrono>

namespace torch_overlap {
namespace {

// Never destroyed: threads use it until the very end.
struct Shutdown {
  std::atomic<bool> begun{false};
  std::timed_mutex dropping;
};

Shutdown& shutdown() {
  static auto* const instance = new Shutdown;
  return *instance;
}

}  // namespace

void begin_process_exit() noexcept {
  shutdown().begun = true;
  if (shutdown().dropping.try_lock_for(std::chrono::seconds(2))) shutdown().dropping.unlock();
}

std::unique_lock<std::timed_mutex> permit_to_drop() {
  std::unique_lock lock(shutdown().dropping);
  if (shutdown().begun) lock.unlock();
  return lock;
}

}  // namespace torch_overlap
