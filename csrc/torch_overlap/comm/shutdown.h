#pragma once

#include <mutex>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap {

// The end of the process, for threads that drop tensors in the background. The last reference to a
// tensor that Python has seen takes Python's lock, and a thread that asks for it while the
// interpreter ends is killed where it stands; CUDA, too, must not be called after its own end.

// From now on such references are leaked. Waits for drops and BackgroundTasks that are under way,
// two seconds at most. The caller does not hold Python's lock. Never undone; may be called again.
TORCH_OVERLAP_API void begin_process_exit() noexcept;

// While a thread has or will do work that ends with such a drop. Who ends the process ends the work
// first.
class TORCH_OVERLAP_API BackgroundTask {
 public:
  BackgroundTask() noexcept;
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

 private:
  const ProcessStamp process_;
};

// Held around every drop in the background. Not owned once the process is ending: drop nothing.
TORCH_OVERLAP_API std::unique_lock<std::timed_mutex> permit_to_drop();

}  // namespace torch_overlap
