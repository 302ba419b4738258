#include "torch_overlap/common/cuda/stream.h"

#include <c10/cuda/CUDAGuard.h>

#include <mutex>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

cudaStream_t make_stream(bool high_priority) {
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     high_priority ? greatest : least),
        "cudaStreamCreateWithPriority");
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
  cudaStream_t take(c10::DeviceIndex device, bool high_priority) {
    const std::lock_guard lock(mutex_);
    for (auto it = retired_.begin(); it != retired_.end(); ++it) {
      if (it->device != device || it->high_priority != high_priority || !is_idle(it->stream)) {
        continue;
      }
      const cudaStream_t stream = it->stream;
      retired_.erase(it);
      return stream;
    }
    return nullptr;
  }

  void give(c10::DeviceIndex device, bool high_priority, cudaStream_t stream) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      retired_.push_back({device, high_priority, stream});
    } catch (const std::bad_alloc&) {  // then it is lost
    }
  }

 private:
  struct Retired {
    c10::DeviceIndex device;
    bool high_priority;
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

cudaStream_t take_stream(c10::DeviceIndex device, bool high_priority) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  const cudaStream_t retired = RetiredStreams::instance().take(device, high_priority);
  return retired != nullptr ? retired : make_stream(high_priority);
}

}  // namespace

OwnedStream::OwnedStream(c10::DeviceIndex device, bool high_priority)
    : high_priority_(high_priority),
      stream_(c10::cuda::getStreamFromExternal(take_stream(device, high_priority), device)) {}

OwnedStream::~OwnedStream() {
  RetiredStreams::instance().give(stream_.device_index(), high_priority_, stream_.stream());
}

}  // namespace torch_overlap::cuda
