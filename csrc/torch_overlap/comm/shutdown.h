#pragma once

#include <utility>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

struct Shutdown;

// The end of the process, for threads in the background. The last reference to a tensor that Python
// has seen takes Python's lock, and a thread that asks for it while the interpreter ends is killed
// where it stands; CUDA, too, must not be called after its own end. So whatever may need either
// (drops, callbacks) is done with a permit, or not at all.

// From now on there are no permits. First waits for BackgroundTasks that are under way, then for
// the permits that are held, two seconds each at most. The caller does not hold Python's lock.
// Never undone; may be called again.
TORCH_OVERLAP_API void begin_process_exit() noexcept;

// While a thread has or will do work that ends with such a drop. Who ends the process ends the work
// first. Where the work takes longer than that waits, the drop gets no permit.
class TORCH_OVERLAP_API BackgroundTask {
 public:
  BackgroundTask() noexcept;
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

 private:
  Shutdown& shutdown_;  // a fork has another
};

// The interpreter and CUDA live as long as this does, if it is granted. Held briefly: around what
// may need one of them. Not granted once the process is ending: call nothing, drop nothing.
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

}  // namespace torch_overlap
