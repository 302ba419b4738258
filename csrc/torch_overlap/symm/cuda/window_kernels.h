#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/symm/cuda/wait_record.h"

namespace torch_overlap::cuda {

// Copies with the stores of a kernel, which starts sooner than a copy engine between two kernels.
// The two ranges must not overlap.
cudaError_t launch_put(void* to, const void* from, size_t bytes, cudaStream_t stream);

// Adds one to *count, in a peer's memory, after all earlier work on the stream. No-op once a wait
// has failed or the host has stopped the waits: the signal may not be true any more.
cudaError_t launch_signal(uint64_t* count, const WaitControl& control, cudaStream_t stream);

// Loads the code of all kernels onto the current device. CUDA loads a kernel at its first launch,
// and may wait for all running kernels: a running wait would then block the put or signal that ends
// it.
cudaError_t load_window_kernels();

struct WaitParams {
  const uint64_t* arrived;  // written by the peer
  uint64_t* consumed;
  WaitControl control;
  uint64_t memory_id;
  int32_t peer;
};

// Consumes the next signal. Waits until it has arrived, the wait is stopped, or the timeout
// expires.
cudaError_t launch_wait(const WaitParams& params, cudaStream_t stream);

}  // namespace torch_overlap::cuda
