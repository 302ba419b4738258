#pragma once

#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {

// Orders what is enqueued on `stream` from now on after the work that `event` was recorded for.
inline void stream_waits(c10::cuda::CUDAStream stream, cudaEvent_t event) {
  check(cudaStreamWaitEvent(stream.stream(), event, 0), "cudaStreamWaitEvent");
}

// A stream of our own: not one of torch's pool, which gives the same streams to several users, and
// never synchronized with the legacy default stream. The destructor does not wait for the work on
// the stream: the stream goes to the next owner that finds it idle. It is never destroyed, because
// torch's caching allocator identifies free memory by the stream that used it.
class OwnedStream {
 public:
  // Priority as CUDA defines it: 0 is the lowest, -1 and below are higher. A value out of the
  // device's range is clamped.
  struct Priority {
    int value = 0;
  };
  // Both may be called during a capture. `high_priority`: the device's highest priority.
  OwnedStream(c10::DeviceIndex device, bool high_priority);
  OwnedStream(c10::DeviceIndex device, Priority priority);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  c10::cuda::CUDAStream get() const { return stream_; }

 private:
  const int priority_;
  c10::cuda::CUDAStream stream_;
};

}  // namespace torch_overlap::cuda
