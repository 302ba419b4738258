#pragma once

#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"

namespace torch_overlap {

// Products of sizes that the host knows, all of one device, in no order among themselves: none may
// write what another reads or writes. On CUDA they run on several streams, which begin after what
// is on the current stream and which it waits for: the results are there for what follows on it.
// Capture-safe. All are checked before any is computed. Products may have one workspace of the
// caller: those that run side by side get a part of it each. Empty groups and empty products are
// fine.
TORCH_OVERLAP_API void grouped_gemm(std::string_view op, const std::vector<GemmArgs>& group);

}  // namespace torch_overlap
