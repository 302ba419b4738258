#include "torch_overlap/comm/shutdown.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "torch_overlap/base/process.h"

namespace torch_overlap {

struct Shutdown {
  std::atomic<bool> begun{false};
  std::atomic<int> tasks{0};
  std::atomic<int> permits{0};
};

namespace {

constexpr auto kLimit = std::chrono::seconds(2);

std::atomic<Shutdown*> current{nullptr};

// A fork has none of the threads that are counted.
void renew_in_fork() {
  auto* const renewed = new Shutdown;
  renewed->begun = current.load()->begun.load();
  current = renewed;
}

struct Registration {
  Registration() {
    current = new Shutdown;
    pthread_atfork(nullptr, nullptr, &renew_in_fork);
  }
};

Shutdown& shutdown() {
  (void)ProcessWide<Registration>::get();
  return *current;
}

void wait_for_none(const std::atomic<int>& count) noexcept {
  const auto until = std::chrono::steady_clock::now() + kLimit;
  while (count > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void begin_process_exit() noexcept {
  Shutdown& all = shutdown();
  wait_for_none(all.tasks);
  all.begun = true;
  wait_for_none(all.permits);
}

BackgroundTask::BackgroundTask() noexcept : shutdown_(shutdown()) { ++shutdown_.tasks; }
BackgroundTask::~BackgroundTask() { --shutdown_.tasks; }

// Counted before the flag is read, and the flag is set before they are counted: one sees the other.
Permit::Permit() noexcept : shutdown_(shutdown()) {
  ++shutdown_.permits;
  granted_ = !shutdown_.begun;
  if (!granted_) --shutdown_.permits;
}

Permit::~Permit() {
  if (granted_) --shutdown_.permits;
}

}  // namespace torch_overlap
