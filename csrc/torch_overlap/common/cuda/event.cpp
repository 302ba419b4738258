#include "torch_overlap/common/cuda/event.h"

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

// Errors are ignored: at the end of a process CUDA may be shut down already.
void destroy(EventPair pair) noexcept {
  if (pair.ready != nullptr) (void)cudaEventDestroy(pair.ready);
  if (pair.end != nullptr) (void)cudaEventDestroy(pair.end);
}

}  // namespace

EventPool::~EventPool() {
  const RelaxedCapture relaxed;
  for (const EventPair pair : free_) destroy(pair);
}

EventPair EventPool::acquire() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const EventPair pair = free_.back();
      free_.pop_back();
      return pair;
    }
  }
  const RelaxedCapture relaxed;
  EventPair pair{.ready = make_event()};
  try {
    pair.end = make_event();
  } catch (...) {
    destroy(pair);
    throw;
  }
  return pair;
}

void EventPool::release(EventPair pair) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (free_.size() < max_free_) {
      free_.push_back(pair);
      return;
    }
  } catch (const std::bad_alloc&) {  // then it is not kept
  }
  const RelaxedCapture relaxed;
  destroy(pair);
}

}  // namespace torch_overlap::cuda
