#pragma once

#include <c10/cuda/CUDAStream.h>

namespace torch_overlap::cuda {

// A stream of our own: not one of torch's pool, which hands the same streams to others, and never
// synchronized with the legacy default stream. Its end does not wait for what is queued on it: the
// stream goes to the next owner that finds it idle. It is never destroyed, because torch's caching
// allocator knows free memory by the stream that used it.
class OwnedStream {
 public:
  // `high_priority`: the greatest priority that the device has. Legal during a capture.
  OwnedStream(c10::DeviceIndex device, bool high_priority);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  c10::cuda::CUDAStream get() const { return stream_; }

 private:
  const bool high_priority_;
  c10::cuda::CUDAStream stream_;
};

}  // namespace torch_overlap::cuda
