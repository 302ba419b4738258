#pragma once

#include <string_view>
#include <vector>

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// Throws if memory that the GEMM writes overlaps any of its other tensors, because it writes while
// it still reads. A residual that is exactly out is allowed.
void check_no_aliasing(const GemmProblem& problem);

// Throws if a GEMM of a group writes what another reads or writes, because they run concurrently.
// Each was checked by itself.
void check_no_aliasing_in_group(std::string_view op, const std::vector<GemmProblem>& group);

}  // namespace torch_overlap
