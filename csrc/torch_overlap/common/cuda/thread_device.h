#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {

// Sets the device of a background thread of the library, which keeps it until it selects another. A
// guard would restore the previous device, and query torch for it. If NCCL returns late, the
// process is ending, and torch has been shut down.
inline void use_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace torch_overlap::cuda
