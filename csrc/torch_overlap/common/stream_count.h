#pragma once

#include <atomic>
#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How many device streams the library has made in this process, which are as many as there are:
// they serve again, and none is destroyed (common/cuda/stream.h). 0 in a build for the CPU.
TORCH_OVERLAP_API std::atomic<int64_t>& streams_made();

}  // namespace torch_overlap
