#pragma once

#include <cuda_runtime_api.h>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {

// For a thread of ours in the background, which has it until it chooses another. A guard would put
// the device back, and ask torch for that: where NCCL comes back late, the process is ending, and
// torch has gone.
inline void use_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace torch_overlap::cuda
