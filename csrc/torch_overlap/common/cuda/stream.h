#pragma once

#include <c10/cuda/CUDAStream.h>

namespace torch_overlap::cuda {

// A stream of our own: not one of torch's pool, which hands the same streams to others, and never
// synchronized with the legacy default stream. Its end does not wait for what is queued on it: the
// stream goes to the next owner that finds it idle. It is never destroyed, because torch's caching
// allocator knows free memory by the stream that used it.
class OwnedStream {
 public:
  // As CUDA counts them: 0 is the least, -1 and below are more urgent. Out of the device's range:
  // the nearest that it has.
  struct Priority {
    int value = 0;
  };
  // Both are legal during a capture. `high_priority`: the greatest that the device has.
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
