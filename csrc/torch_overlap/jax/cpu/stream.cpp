#include "torch_overlap/jax/stream.h"

#include "torch_overlap/base/errors.h"

namespace torch_overlap::jax {

std::unique_ptr<CapturedGraphs> make_captured_graphs() { return nullptr; }

void run_on_stream(const ffi::Context&, c10::Device, const std::function<void()>& body,
                   CapturedGraphs*, const Addresses&) {
  body();
}

c10::Device stream_device(const ffi::Context&, int) { return {c10::kCPU}; }

void prepare_device(c10::DeviceType type) {
  TORCH_OVERLAP_CHECK(type == c10::kCPU, kUnsupported, "bootstrap: expected CPU devices, got ",
                      c10::DeviceTypeName(type, /*lower_case=*/true),
                      "; this torch_overlap was built without CUDA. Build it with FORCE_CUDA=1.");
}

}  // namespace torch_overlap::jax
