#include "torch_overlap/common/cuda/stream.h"

#include <c10/cuda/CUDAGuard.h>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

cudaStream_t make_stream(c10::DeviceIndex device, bool high_priority) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     high_priority ? greatest : least),
        "cudaStreamCreateWithPriority");
  return stream;
}

}  // namespace

OwnedStream::OwnedStream(c10::DeviceIndex device, bool high_priority)
    : stream_(c10::cuda::getStreamFromExternal(make_stream(device, high_priority), device)) {}

OwnedStream::~OwnedStream() {
  const RelaxedCapture relaxed;
  (void)cudaStreamDestroy(stream_.stream());
}

}  // namespace torch_overlap::cuda
