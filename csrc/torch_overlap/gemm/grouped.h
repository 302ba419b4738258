#pragma once

#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"

namespace torch_overlap {

// Runs GEMMs whose sizes the host knows, all on one device, unordered among themselves: none may
// write what another reads or writes. On CUDA they run on several streams, forked from the current
// stream and joined to it. Capture-safe. All are checked before any is computed. The GEMMs may name
// the same workspace; those that run concurrently get a part of it each. Empty groups and empty
// GEMMs are allowed.
TORCH_OVERLAP_API void grouped_gemm(std::string_view op, const std::vector<GemmArgs>& group);

}  // namespace torch_overlap
