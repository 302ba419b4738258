#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "torch_overlap/jax/ffi.h"

// XLA's streams as torch's. cpu/stream.cpp or cuda/stream.cpp defines these functions.
namespace torch_overlap::jax {

// The addresses of a call's operands and results, in their order.
using Addresses = std::vector<const void*>;

// The graphs of one custom call, of which XLA captures a new one whenever an array has moved. They
// are kept: a command buffer that XLA updates does not keep alive what its graph needs.
class CapturedGraphs {
 public:
  virtual ~CapturedGraphs() = default;
};
// Null on the CPU.
std::unique_ptr<CapturedGraphs> make_captured_graphs();

// Runs `body` with the stream of the call as torch's current one on this thread, and its device as
// the current device; on the CPU without either. If XLA is capturing the stream, captures `body` in
// a graph of `graphs`, unless there is one of these addresses, and makes it a part of XLA's.
void run_on_stream(const ffi::Context& context, c10::Device device,
                   const std::function<void()>& body, CapturedGraphs* graphs = nullptr,
                   const Addresses& addresses = {});

// Returns the device that runs the call: CPU if it has no stream.
c10::Device stream_device(const ffi::Context& context, int ordinal);

// Initializes torch for a type of device, in a process that may have no `import torch`. Throws
// kUnsupported if this build has no support for it.
void prepare_device(c10::DeviceType type);

}  // namespace torch_overlap::jax
