#pragma once

#include <string_view>
#include <vector>

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// A product writes while it still reads: throws where what it writes shares memory with anything
// else of it, but for a residual that is out itself.
void check_apart(const GemmProblem& problem);

// Products of a group run side by side: none may write what another reads or writes. Each was
// checked by itself.
void check_group_apart(std::string_view op, const std::vector<GemmProblem>& group);

}  // namespace torch_overlap
