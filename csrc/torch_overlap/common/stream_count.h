#pragma once

#include <atomic>
#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Returns the number of device streams that the library has created in this process. All of them
// exist: they are reused, and none is destroyed (common/cuda/stream.h). 0 in a build for the CPU.
TORCH_OVERLAP_API std::atomic<int64_t>& num_streams_created();

}  // namespace torch_overlap
