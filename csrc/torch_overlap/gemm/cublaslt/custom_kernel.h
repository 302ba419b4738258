#pragma once

#include <optional>

#include "torch_overlap/gemm/cublaslt/key.h"
#include "torch_overlap/gemm/sm90/gemm.h"

namespace torch_overlap::cublaslt {

// Returns the call as a problem of this project's kernels, with the result in `d`; nullopt if they
// do not support it.
std::optional<sm90::Problem> custom_kernel_problem(const LtMatmulArgs& call, void* d);

}  // namespace torch_overlap::cublaslt
