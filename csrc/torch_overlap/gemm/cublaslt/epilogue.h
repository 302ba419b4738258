#pragma once

#include <cublasLt.h>

#include <optional>

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap::cublaslt {

// Returns the cuBLASLt epilogue that does everything requested in addition to the product, except
// bias_grad as the sum over k; nullopt if types, strides or the combination rule it out. The
// library may still refuse it. Plans do not request GELU with a residual from it, which this
// project's kernels support.
std::optional<cublasLtEpilogue_t> fused_epilogue(const GemmProblem& problem);
// has_bias_grad_over_k(): true if bias_grad as the sum over k is requested.
// can_fuse_bias_grad_over_k(): true if the library may have one epilogue for it and everything
// else.
bool has_bias_grad_over_k(const GemmProblem& problem);
bool can_fuse_bias_grad_over_k(const GemmProblem& problem);

// Tensors that an epilogue reads or writes in addition to D; undefined if there are none.
at::Tensor bias_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue);
at::Tensor aux_of(const GemmEpilogue& asked, cublasLtEpilogue_t epilogue);

}  // namespace torch_overlap::cublaslt
