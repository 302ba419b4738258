#include "torch_overlap/comm/shutdown.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "torch_overlap/base/process.h"

namespace torch_overlap {
namespace {

// Never destroyed: threads use it until the very end.
struct Shutdown {
  std::atomic<bool> begun{false};
  std::timed_mutex dropping;
  std::atomic<int> tasks{0};
  const ProcessStamp process{};  // a fork has none of the threads
};

Shutdown& shutdown() {
  static auto* const instance = new Shutdown;
  return *instance;
}

}  // namespace

void begin_process_exit() noexcept {
  Shutdown& all = shutdown();
  all.begun = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  if (all.dropping.try_lock_until(until)) all.dropping.unlock();
  while (all.tasks > 0 && all.process.is_current() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

BackgroundTask::BackgroundTask() noexcept { ++shutdown().tasks; }

BackgroundTask::~BackgroundTask() { --shutdown().tasks; }

std::unique_lock<std::timed_mutex> permit_to_drop() {
  std::unique_lock lock(shutdown().dropping);
  if (shutdown().begun) lock.unlock();
  return lock;
}

}  // namespace torch_overlap
