#pragma once

#include <utility>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

struct Shutdown;

// Process exit, for background threads. Dropping the last reference to a tensor that Python has
// seen acquires Python's lock, and a thread that waits for it while the interpreter ends is killed
// where it stands. CUDA, too, must not be called after its own end. Therefore, whatever may need
// either of them (drops, callbacks) is done with a permit, or not at all.

// Ends the granting of permits. First waits for the BackgroundTasks that are running, then, with no
// more permits granted, for the permits that are held; at most two seconds each. The caller must
// not hold Python's lock. Never undone; may be called again.
TORCH_OVERLAP_API void begin_process_exit() noexcept;

// Adds a function that ends communicators which no user can finalize, since a front end made them.
// run_exit_functions() calls all functions once; process exit does so before it aborts what is
// left.
TORCH_OVERLAP_API void at_process_exit(void (*function)());
TORCH_OVERLAP_API void run_exit_functions();

// Held while a thread has, or will have, work that ends with such a drop. begin_process_exit()
// waits for that work first. If the work takes longer than that wait, its drop gets no permit.
class TORCH_OVERLAP_API BackgroundTask {
 public:
  BackgroundTask() noexcept;
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

 private:
  Shutdown& shutdown_;  // a fork has a different one
};

// Keeps the interpreter and CUDA alive while it exists, if it is granted. Hold it briefly, around
// what may need one of them. It is not granted once the process is ending: then call nothing and
// drop nothing.
class TORCH_OVERLAP_API Permit {
 public:
  Permit() noexcept;
  ~Permit();
  Permit(const Permit&) = delete;
  Permit& operator=(const Permit&) = delete;
  explicit operator bool() const { return granted_; }

 private:
  Shutdown& shutdown_;
  bool granted_;
};

template <typename T>
void drop_or_leak(T object) {
  const Permit permit;
  if (permit) {
    const T dropped = std::move(object);
  } else {
    (void)new T(std::move(object));
  }
}

// Holds an object that is leaked if the process has begun to exit when this is destroyed: while
// members that are destroyed before it waited for other ranks, CUDA may have ended.
template <typename T>
class LeakedAtExit {
 public:
  LeakedAtExit() = default;
  explicit LeakedAtExit(T object) : object_(std::move(object)) {}
  ~LeakedAtExit() { drop_or_leak(std::move(object_)); }
  LeakedAtExit(const LeakedAtExit&) = delete;
  LeakedAtExit& operator=(const LeakedAtExit&) = delete;

  T& operator*() { return object_; }
  const T& operator*() const { return object_; }
  T* operator->() { return &object_; }
  const T* operator->() const { return &object_; }

 private:
  T object_;
};

}  // namespace torch_overlap
