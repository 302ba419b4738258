#include "torch_overlap/comm/shutdown.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

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

// Resets the counts in a fork, which has none of the counted threads.
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
  (void)LeakySingleton<Registration>::get();
  return *current;
}

void wait_for_none(const std::atomic<int>& count) noexcept {
  const auto until = std::chrono::steady_clock::now() + kLimit;
  while (count > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct ExitFunctions {
  ForkSafeMutex mutex;
  std::vector<void (*)()> all;
};

}  // namespace

void at_process_exit(void (*function)()) {
  auto& functions = LeakySingleton<ExitFunctions>::get();
  const std::lock_guard lock(functions.mutex);
  functions.all.push_back(function);
}

void run_exit_functions() {
  std::vector<void (*)()> all;
  {
    auto& functions = LeakySingleton<ExitFunctions>::get();
    const std::lock_guard lock(functions.mutex);
    all.swap(functions.all);
  }
  for (const auto function : all) function();
}

void begin_process_exit() noexcept {
  Shutdown& all = shutdown();
  wait_for_none(all.tasks);
  all.begun = true;
  wait_for_none(all.permits);
}

BackgroundTask::BackgroundTask() noexcept : shutdown_(shutdown()) { ++shutdown_.tasks; }
BackgroundTask::~BackgroundTask() { --shutdown_.tasks; }

// The permit is counted before the flag is read, and begin_process_exit() sets the flag before it
// reads the count: at least one side sees the other.
Permit::Permit() noexcept : shutdown_(shutdown()) {
  ++shutdown_.permits;
  granted_ = !shutdown_.begun;
  if (!granted_) --shutdown_.permits;
}

Permit::~Permit() {
  if (granted_) --shutdown_.permits;
}

}  // namespace torch_overlap
