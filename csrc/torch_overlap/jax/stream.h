#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "torch_overlap/jax/ffi.h"

// XLA's streams as torch's. cpu/stream.cpp or cuda/stream.cpp defines these functions.
namespace torch_overlap::jax {

class StreamScope {
 public:
  virtual ~StreamScope() = default;
};

// While the result lives, the stream of the call is torch's current one on this thread, and its
// device the current device. If the stream is capturing, memory is allocated for the replays. Null
// on the CPU.
std::unique_ptr<StreamScope> enter_stream(const ffi::Context& context, c10::Device device);

// Returns the device that runs the call: CPU if it has no stream.
c10::Device stream_device(const ffi::Context& context, int ordinal);

// Initializes torch for a type of device, in a process that may have no `import torch`. Throws
// kUnsupported if this build has no support for it.
void prepare_device(c10::DeviceType type);

}  // namespace torch_overlap::jax
