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
    mutexes_.push_back(&mutex);
    taken_.reserve(mutexes_.size());  // nothing is allocated around a fork
  }

  void remove(const std::mutex& mutex) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase(mutexes_, &mutex);
  }

 private:
  Forks() {
    const auto in_child = [] {
      forks.fetch_add(1, std::memory_order_relaxed);
      instance().after();
    };
    pthread_atfork([] { instance().before(); }, [] { instance().after(); }, in_child);
  }

  // Who forks waits for one only while it holds none, in whatever order other threads take several.
  // When it has waited for long, one stays held: it goes on without that, and with all others.
  void before() noexcept {
    mutex_.lock();
    for (const auto until = Clock::now() + kPatience; !take_free() && Clock::now() < until;) {
      after();
      std::this_thread::sleep_for(kNap);
      mutex_.lock();
    }
    for (const auto until = Clock::now() + kRest; !take_free() && Clock::now() < until;) {
      std::this_thread::yield();
    }
  }

  // Whether all are taken.
  bool take_free() noexcept {
    for (std::mutex* const mutex : mutexes_) {
      const bool is_mine = std::find(taken_.begin(), taken_.end(), mutex) != taken_.end();
      if (!is_mine && mutex->try_lock()) taken_.push_back(mutex);
    }
    return taken_.size() == mutexes_.size();
  }

  void after() noexcept {
    for (std::mutex* const mutex : taken_) mutex->unlock();
    taken_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;  // of both lists
  std::vector<std::mutex*> mutexes_;
  std::vector<std::mutex*> taken_;  // by who forks
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
