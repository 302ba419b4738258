#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Records the process that created it, so that a child of fork(), which has the objects of its
// parent but none of its threads, can detect what it must not use. The check costs one load.
class TORCH_OVERLAP_API ProcessStamp {
 public:
  ProcessStamp();
  bool is_current() const noexcept;

 private:
  uint64_t fork_count_;
};

// A mutex that a child of fork() may lock, such as the mutexes of process-wide registries. The
// child has none of the threads that held one at the fork, and would wait for them forever. fork()
// locks all of these mutexes first, so that the child finds them free and the data that they guard
// consistent.
//
// Hold it briefly, and acquire no lock of Python under it: the thread that forks holds that lock.
// fork() skips a mutex that was not free once in two seconds.
class TORCH_OVERLAP_API ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

// The only T of the process. It is created when the library is loaded, or by the first static
// initializer that asks for it. No fork can happen in between, as it can while a thread creates a
// function's static variable and the other callers wait for that thread. It is never destroyed:
// threads, and objects that Python holds, use it until the process ends.
template <typename T>
class LeakySingleton {
 public:
  static T& get() {
    static_cast<void>(&loaded_);  // `loaded_` exists only if something names it
    return made();
  }

 private:
  static T& made() {
    static T* const one = new T;
    return *one;
  }
  static inline T* const loaded_ = &made();
};

// Returns the result of `make`, which is created when it is first needed at this place in the
// program, and never destroyed. For results that depend on the environment or on files, and are
// therefore not created when the library is loaded. Concurrent threads create one each, of which
// one is kept: no thread waits for another, which a child of fork() may not have.
template <typename Make>
auto& lazy_leaky_singleton(const Make& make) {
  using T = std::invoke_result_t<const Make&>;
  static std::atomic<T*> known{nullptr};
  T* one = known.load(std::memory_order_acquire);
  if (one != nullptr) return *one;
  auto made = std::unique_ptr<T>(new T(make()));
  if (known.compare_exchange_strong(one, made.get(), std::memory_order_acq_rel)) {
    one = made.release();
  }
  return *one;
}

}  // namespace torch_overlap
