#pragma once

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// Makes all checks of gemm(). `args` must outlive the result.
GemmProblem checked_problem(std::string_view op, const GemmArgs& args);

}  // namespace torch_overlap
