#pragma once

#include <cublasLt.h>

#include <optional>

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap::cublaslt {

// The epilogue of cuBLASLt that does all that is asked beside the product, but for the bias_grad
// that is a sum over k; nullopt where types, strides or the combination rule it out. The library
// may still refuse it, and plans do not ask it for GELU with a residual, which our own kernels
// have.
std::optional<cublasLtEpilogue_t> fused_epilogue(const GemmProblem& problem);
// Whether that bias_grad is asked, and the library may have one epilogue for it and all else.
bool sums_over_k(const GemmProblem& problem);
bool may_fuse_sum_over_k(const GemmProblem& problem);

// What an epilogue reads or writes beside D; undefined: nothing.
at::Tensor bias_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue);
at::Tensor aux_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue);

}  // namespace torch_overlap::cublaslt
