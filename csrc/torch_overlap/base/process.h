#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Remembers the process that made it, so that a child of fork(), which has the objects of its
// parent and none of its threads, can be told what it must not use. Asking costs one load.
class TORCH_OVERLAP_API ProcessStamp {
 public:
  ProcessStamp();
  bool is_current() const noexcept;

 private:
  uint64_t forks_;
};

// A mutex that a child of fork() may take, as those of the registries of the process. The child has
// none of the threads that held one at the fork, and would wait for them without end; fork() takes
// all of these first, so that the child finds them free, and what they guard whole.
//
// Hold it briefly, and take no lock of Python's under it: the thread that forks has that. fork()
// leaves alone what was not free once in two seconds.
class TORCH_OVERLAP_API ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

// The one T of the process. Made when the library is loaded, or by whichever static initializer
// asks for it first: no fork comes in between, as it may where a function has a static variable,
// whose other callers wait for the thread that makes it. Never destroyed: threads, and what Python
// holds, go on using it until the very end.
template <typename T>
class ProcessWide {
 public:
  static T& get() {
    static_cast<void>(&loaded_);  // there is no such object unless something names it
    return made();
  }

 private:
  static T& made() {
    static T* const one = new T;
    return *one;
  }
  static inline T* const loaded_ = &made();
};

// What `make` returns, made when it is first needed at this place of the program, and never
// destroyed: for what reads the environment or files, and so is not made when the library is
// loaded. Threads that come at once make one each, of which one stays: none waits for another,
// which a fork may not have.
template <typename Make>
auto& made_once(const Make& make) {
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
