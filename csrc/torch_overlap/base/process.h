#pragma once

#include <cstdint>
#include <mutex>

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

// A mutex of what a child of fork() goes on using, as the registries of the process. The thread
// that held another mutex at the fork does not exist in the child, which waits for it without end;
// fork() takes all of these first, so that a child finds them free, and what they guard whole.
//
// Held for moments only, and without Python's lock in between: fork() gives up on them after two
// seconds, since its thread may hold what another one waits for.
class TORCH_OVERLAP_API ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

// The one T of the process. Made when the library is loaded, or by whichever static initializer
// asks for it first: no fork comes in between. Never destroyed: threads, and what Python holds, go
// on using it until the very end.
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
  static inline T& loaded_ = made();
};

}  // namespace torch_overlap
