#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/symm/cuda/wait_record.h"

namespace torch_overlap::cuda {

// Copies with the stores of a kernel: starts sooner than a copy engine between two kernels. The two
// ranges do not overlap.
cudaError_t launch_put(void* to, const void* from, size_t bytes, cudaStream_t stream);

// Adds one to *count, in a peer's memory, after everything that was before it on the stream. Does
// nothing once `failed` is set: what would be signalled need not be right.
cudaError_t launch_signal(uint64_t* count, const uint32_t* failed, cudaStream_t stream);

struct WaitParams {
  const uint64_t* arrived;  // written by the peer
  uint64_t* consumed;
  uint32_t* failed;    // device memory; set by the first wait that expires
  WaitRecord* record;  // mapped host memory
  uint64_t timeout_ns;
  uint64_t window;
  int32_t peer;
};

// Takes the next signal and waits until it has arrived, was stopped, or the time is over.
cudaError_t launch_wait(const WaitParams& params, cudaStream_t stream);

}  // namespace torch_overlap::cuda
