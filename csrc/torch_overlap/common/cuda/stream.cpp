#include "torch_overlap/common/cuda/stream.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/stream_count.h"

namespace torch_overlap::cuda {
namespace {

// One that the device has.
int to_priority(c10::DeviceIndex device, int wish) {
  const c10::cuda::CUDAGuard guard(device);
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  return std::clamp(wish, greatest, least);
}

cudaStream_t make_stream(int priority) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
        "cudaStreamCreateWithPriority");
  streams_made().fetch_add(1, std::memory_order_relaxed);
  return stream;
}

// Streams without an owner. Never destroyed: CUDA may be gone before it would be.
class RetiredStreams {
 public:
  static RetiredStreams& instance() {
    static auto* const streams = new RetiredStreams;
    return *streams;
  }

  // One that is idle; null for none. The device is current.
  cudaStream_t take(c10::DeviceIndex device, int priority) {
    const std::lock_guard lock(mutex_);
    for (auto it = retired_.begin(); it != retired_.end(); ++it) {
      if (it->device != device || it->priority != priority || !is_idle(it->stream)) {
        continue;
      }
      const cudaStream_t stream = it->stream;
      retired_.erase(it);
      return stream;
    }
    return nullptr;
  }

  void give(c10::DeviceIndex device, int priority, cudaStream_t stream) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      retired_.push_back({device, priority, stream});
    } catch (const std::bad_alloc&) {  // then it is lost
    }
  }

 private:
  struct Retired {
    c10::DeviceIndex device;
    int priority;
    cudaStream_t stream;
  };

  // A stream that a capture took in may not be asked for more than that.
  static bool is_idle(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const bool idle = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                      capture == cudaStreamCaptureStatusNone &&
                      cudaStreamQuery(stream) == cudaSuccess;
    if (!idle) (void)cudaGetLastError();
    return idle;
  }

  std::mutex mutex_;
  std::vector<Retired> retired_;
};

cudaStream_t take_stream(c10::DeviceIndex device, int priority) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  const cudaStream_t retired = RetiredStreams::instance().take(device, priority);
  return retired != nullptr ? retired : make_stream(priority);
}

}  // namespace

OwnedStream::OwnedStream(c10::DeviceIndex device, bool high_priority)
    : OwnedStream(device, Priority{high_priority ? std::numeric_limits<int>::min() : 0}) {}

OwnedStream::OwnedStream(c10::DeviceIndex device, Priority priority)
    : priority_(to_priority(device, priority.value)),
      stream_(c10::cuda::getStreamFromExternal(take_stream(device, priority_), device)) {}

OwnedStream::~OwnedStream() {
  RetiredStreams::instance().give(stream_.device_index(), priority_, stream_.stream());
}

}  // namespace torch_overlap::cuda
