#include "torch_overlap/base/process.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kForkLockTimeout = std::chrono::seconds(2);
constexpr auto kForkGracePeriod = std::chrono::milliseconds(100);
constexpr auto kForkPollInterval = std::chrono::microseconds(50);

// Number of forks between the process that loaded the library and this one.
std::atomic<uint64_t> forks{0};

// Handlers around a fork of this process. Never destroyed: forks may happen until the process ends.
class ForkLocks {
 public:
  static ForkLocks& instance() {
    static auto* const instance = new ForkLocks;
    return *instance;
  }

  void add(std::mutex& mutex) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({.mutex = &mutex});
  }

  void remove(const std::mutex& mutex) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [&](const Entry& entry) { return entry.mutex == &mutex; });
  }

 private:
  struct Entry {
    std::mutex* mutex;
    bool is_locked = false;  // by the forking thread
    bool was_free = false;   // at least once since the fork began
  };

  ForkLocks() {
    const auto in_child = [] {
      forks.fetch_add(1, std::memory_order_relaxed);
      instance().after();
    };
    pthread_atfork([] { instance().before(); }, [] { instance().after(); }, in_child);
  }

  // The forking thread waits for a mutex only while it holds none, so the order in which other
  // threads lock several does not matter. After the timeout, a mutex that has never been free is
  // skipped.
  void before() noexcept {
    const auto until = Clock::now() + kForkLockTimeout;
    mutex_.lock();
    for (Entry& entry : entries_) entry.was_free = false;
    while (!take(/*all=*/Clock::now() < until) && Clock::now() < until + kForkGracePeriod) {
      after();
      std::this_thread::sleep_for(kForkPollInterval);
      mutex_.lock();
    }
  }

  // Locks the mutexes that are free. Returns true if these are all, or without `all`, all that have
  // been free once.
  bool take(bool all) noexcept {
    bool is_missing = false;
    for (Entry& entry : entries_) {
      entry.is_locked = entry.mutex->try_lock();
      entry.was_free = entry.was_free || entry.is_locked;
      is_missing = is_missing || (!entry.is_locked && (all || entry.was_free));
    }
    return !is_missing;
  }

  void after() noexcept {
    for (Entry& entry : entries_) {
      if (entry.is_locked) entry.mutex->unlock();
      entry.is_locked = false;
    }
    mutex_.unlock();
  }

  std::mutex mutex_;  // of the list; held by the forking thread
  std::vector<Entry> entries_;
};

}  // namespace

ProcessStamp::ProcessStamp() {
  (void)ForkLocks::instance();  // counts forks from now on
  fork_count_ = forks.load(std::memory_order_relaxed);
}

bool ProcessStamp::is_current() const noexcept {
  return fork_count_ == forks.load(std::memory_order_relaxed);
}

ForkSafeMutex::ForkSafeMutex() { ForkLocks::instance().add(*this); }

ForkSafeMutex::~ForkSafeMutex() { ForkLocks::instance().remove(*this); }

}  // namespace torch_overlap
