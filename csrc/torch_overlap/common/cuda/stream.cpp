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

// Clamps a priority to the device's range.
int to_priority(c10::DeviceIndex device, int requested) {
  const c10::cuda::CUDAGuard guard(device);
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  return std::clamp(requested, greatest, least);
}

cudaStream_t make_stream(int priority) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
        "cudaStreamCreateWithPriority");
  num_streams_created().fetch_add(1, std::memory_order_relaxed);
  return stream;
}

// Streams without an owner. Never destroyed: CUDA may be shut down before.
class FreeStreamPool {
 public:
  static FreeStreamPool& instance() {
    static auto* const streams = new FreeStreamPool;
    return *streams;
  }

  // Returns an idle stream, or null if there is none. The device must be current.
  cudaStream_t acquire(c10::DeviceIndex device, int priority) {
    const std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->device != device || it->priority != priority || !is_idle(it->stream)) {
        continue;
      }
      const cudaStream_t stream = it->stream;
      free_.erase(it);
      return stream;
    }
    return nullptr;
  }

  void release(c10::DeviceIndex device, int priority, cudaStream_t stream) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      free_.push_back({device, priority, stream});
    } catch (const std::bad_alloc&) {  // then it leaks
    }
  }

 private:
  struct Retired {
    c10::DeviceIndex device;
    int priority;
    cudaStream_t stream;
  };

  // A stream that has joined a capture must not be queried for anything else.
  static bool is_idle(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const bool idle = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                      capture == cudaStreamCaptureStatusNone &&
                      cudaStreamQuery(stream) == cudaSuccess;
    if (!idle) (void)cudaGetLastError();
    return idle;
  }

  std::mutex mutex_;
  std::vector<Retired> free_;
};

cudaStream_t take_stream(c10::DeviceIndex device, int priority) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  const cudaStream_t retired = FreeStreamPool::instance().acquire(device, priority);
  return retired != nullptr ? retired : make_stream(priority);
}

}  // namespace

OwnedStream::OwnedStream(c10::DeviceIndex device, bool high_priority)
    : OwnedStream(device, Priority{high_priority ? std::numeric_limits<int>::min() : 0}) {}

OwnedStream::OwnedStream(c10::DeviceIndex device, Priority priority)
    : priority_(to_priority(device, priority.value)),
      stream_(c10::cuda::getStreamFromExternal(take_stream(device, priority_), device)) {}

OwnedStream::~OwnedStream() {
  FreeStreamPool::instance().release(stream_.device_index(), priority_, stream_.stream());
}

}  // namespace torch_overlap::cuda
