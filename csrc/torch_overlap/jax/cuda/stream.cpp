#include "torch_overlap/jax/stream.h"

#include <ATen/Context.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/capture.h"

namespace torch_overlap::jax {
namespace {

// While it exists, what this thread allocates on a device comes from a pool that is never freed:
// replays of a graph use the memory that its calls were captured with. All graphs share the pool,
// since XLA replays those of a device one after the other.
class CapturedMemory {
 public:
  explicit CapturedMemory(c10::DeviceIndex device) : device_(device) {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_, pool(), [thread = std::this_thread::get_id()](cudaStream_t) {
          return std::this_thread::get_id() == thread;
        });
  }
  ~CapturedMemory() { c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, pool()); }
  CapturedMemory(const CapturedMemory&) = delete;
  CapturedMemory& operator=(const CapturedMemory&) = delete;

 private:
  static c10::MempoolId_t pool() {
    static const auto id = at::cuda::MemPool::graph_pool_handle();
    return id;
  }

  c10::DeviceIndex device_;
};

class CudaStreamScope final : public StreamScope {
 public:
  explicit CudaStreamScope(c10::cuda::CUDAStream stream) : guard_(stream) {
    if (is_capturing(stream.device())) captured_memory_.emplace(stream.device_index());
  }

 private:
  c10::cuda::CUDAStreamGuard guard_;
  std::optional<CapturedMemory> captured_memory_;
};

}  // namespace

std::unique_ptr<StreamScope> enter_stream(const ffi::Context& context, c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  const auto stream = context.get<ffi::PlatformStream<cudaStream_t>>();
  if (!stream.has_value()) fail(ErrorKind::kRuntime, stream.error().message());
  return std::make_unique<CudaStreamScope>(
      c10::cuda::getStreamFromExternal(*stream, device.index()));
}

c10::Device stream_device(const ffi::Context& context, int ordinal) {
  if (!context.get<ffi::PlatformStream<cudaStream_t>>().has_value()) return {c10::kCPU};
  prepare_device(c10::kCUDA);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(ordinal)};
}

void prepare_device(c10::DeviceType type) {
  TORCH_OVERLAP_CHECK(type == c10::kCPU || type == c10::kCUDA, kUnsupported,
                      "bootstrap: expected CPU or CUDA devices, got ",
                      c10::DeviceTypeName(type, /*lower_case=*/true), ". Use one of them.");
  if (type == c10::kCUDA) at::globalContext().lazyInitDevice(type);
}

}  // namespace torch_overlap::jax
