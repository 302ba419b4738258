#include "torch_overlap/base/process.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kRest = std::chrono::milliseconds(100);
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
    entries_.push_back({.mutex = &mutex});
  }

  void remove(const std::mutex& mutex) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [&](const Entry& entry) { return entry.mutex == &mutex; });
  }

 private:
  struct Entry {
    std::mutex* mutex;
    bool is_taken = false;  // by who forks
    bool was_free = false;  // since that began
  };

  Forks() {
    const auto in_child = [] {
      forks.fetch_add(1, std::memory_order_relaxed);
      instance().after();
    };
    pthread_atfork([] { instance().before(); }, [] { instance().after(); }, in_child);
  }

  // Who forks waits for one only while it holds none, in whatever order other threads take several.
  // After its patience, what has never been free is left alone.
  void before() noexcept {
    const auto until = Clock::now() + kPatience;
    mutex_.lock();
    for (Entry& entry : entries_) entry.was_free = false;
    while (!take(/*all=*/Clock::now() < until) && Clock::now() < until + kRest) {
      after();
      std::this_thread::sleep_for(kNap);
      mutex_.lock();
    }
  }

  // Takes those that are free; whether these are all, or all that were.
  bool take(bool all) noexcept {
    bool is_missing = false;
    for (Entry& entry : entries_) {
      entry.is_taken = entry.mutex->try_lock();
      entry.was_free = entry.was_free || entry.is_taken;
      is_missing = is_missing || (!entry.is_taken && (all || entry.was_free));
    }
    return !is_missing;
  }

  void after() noexcept {
    for (Entry& entry : entries_) {
      if (entry.is_taken) entry.mutex->unlock();
      entry.is_taken = false;
    }
    mutex_.unlock();
  }

  std::mutex mutex_;  // of the list; who forks keeps it
  std::vector<Entry> entries_;
};

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
