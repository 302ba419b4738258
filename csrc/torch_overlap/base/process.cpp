#include "torch_overlap/base/process.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kNap = std::chrono::microseconds(50);

// How many forks lie between this process and the one that loaded the library.
std::atomic<uint64_t> forks{0};

// What happens around a fork of this process. Never destroyed: forks end with the process only.
class Forks {
 public:
  static Forks& instance() {
    static auto* const instance = new Forks;
    return *instance;
  }

  void add(std::mutex& mutex) {
    const std::lock_guard lock(mutex_);
    mutexes_.push_back(&mutex);
  }

  void remove(const std::mutex& mutex) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase(mutexes_, &mutex);
  }

 private:
  Forks() {
    pthread_atfork([] { instance().before(); }, [] { instance().release(); },
                   [] {
                     forks.fetch_add(1, std::memory_order_relaxed);
                     instance().release();
                   });
  }

  void before() noexcept {
    const auto until = Clock::now() + kPatience;
    while (!(holds_ = try_all()) && Clock::now() < until) std::this_thread::sleep_for(kNap);
  }

  // All or none, and no wait while some are held: whatever the order in which other threads take
  // several of them, none waits for this one for long.
  bool try_all() noexcept {
    if (!mutex_.try_lock()) return false;
    const auto busy = std::find_if(mutexes_.begin(), mutexes_.end(),
                                   [](std::mutex* mutex) { return !mutex->try_lock(); });
    if (busy == mutexes_.end()) return true;
    std::for_each(mutexes_.begin(), busy, [](std::mutex* mutex) { mutex->unlock(); });
    mutex_.unlock();
    return false;
  }

  void release() noexcept {
    if (!holds_) return;
    for (std::mutex* mutex : mutexes_) mutex->unlock();
    mutex_.unlock();
    holds_ = false;
  }

  // Of the thread that forks: several may at once.
  static thread_local bool holds_;

  std::mutex mutex_;  // of the list
  std::vector<std::mutex*> mutexes_;
};

thread_local bool Forks::holds_ = false;

}  // namespace

ProcessStamp::ProcessStamp() {
  (void)Forks::instance();  // counts from now on
  forks_ = forks.load(std::memory_order_relaxed);
}

bool ProcessStamp::is_current() const noexcept {
  return forks_ == forks.load(std::memory_order_relaxed);
}

ForkSafeMutex::ForkSafeMutex() { Forks::instance().add(*this); }

ForkSafeMutex::~ForkSafeMutex() { Forks::instance().remove(*this); }

}  // namespace torch_overlap
