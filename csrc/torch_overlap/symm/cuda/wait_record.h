#pragma once

#include <cstdint>

namespace torch_overlap::cuda {

// What a communicator's waits on the device and its host tell each other: in mapped host memory, so
// that a write of either side is seen by the other while kernels run.
struct WaitRecord {
  // Host to device: no wait goes on.
  uint32_t stopped;
  // Device to host: 1 once the rest is written. Only the first wait that expires writes.
  uint32_t expired;
  uint64_t window;  // SymmetricMemory::id()
  int32_t peer;
  uint64_t expected;
  uint64_t seen;
  uint64_t timeout_ns;
};

}  // namespace torch_overlap::cuda
