#pragma once

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// All checks of gemm(). `args` must outlive what is returned.
GemmProblem checked_problem(std::string_view op, const GemmArgs& args);

}  // namespace torch_overlap
