#include "torch_overlap/jax/stream.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::jax {
namespace {

class CudaStreamScope final : public StreamScope {
 public:
  explicit CudaStreamScope(c10::cuda::CUDAStream stream) : guard_(stream) {}

 private:
  c10::cuda::CUDAStreamGuard guard_;
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
