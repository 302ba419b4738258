#include "torch_overlap/comm/shutdown.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace torch_overlap {
namespace {

struct Shutdown {
  std::atomic<bool> begun{false};
  std::timed_mutex dropping;
  std::atomic<int> tasks{0};
};

// Never destroyed: threads use it until the very end.
std::atomic<Shutdown*> instance{nullptr};

// A fork has none of the threads, and may have a lock that one of them held.
void renew_in_fork() {
  auto* const renewed = new Shutdown;
  renewed->begun = instance.load()->begun.load();
  instance = renewed;
}

Shutdown& shutdown() {
  static const int registered = [] {
    instance = new Shutdown;
    return pthread_atfork(nullptr, nullptr, &renew_in_fork);
  }();
  (void)registered;
  return *instance;
}

}  // namespace

void begin_process_exit() noexcept {
  Shutdown& all = shutdown();
  all.begun = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  if (all.dropping.try_lock_until(until)) all.dropping.unlock();
  while (all.tasks > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

BackgroundTask::BackgroundTask() noexcept { ++shutdown().tasks; }

BackgroundTask::~BackgroundTask() {
  if (process_.is_current()) --shutdown().tasks;
}

std::unique_lock<std::timed_mutex> permit_to_drop() {
  std::unique_lock lock(shutdown().dropping);
  if (shutdown().begun) lock.unlock();
  return lock;
}

}  // namespace torch_overlap
