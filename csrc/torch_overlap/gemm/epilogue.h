#pragma once

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// Epilogues as torch operators: any device, on the current stream, capture-safe.

// Finishes the problem from its product, fp32 (fp64) [m, n], which is overwritten: writes out and
// the other results of the epilogue and of 8-bit out, except bias_grad as the sum over k.
void apply_unfused_epilogue(const GemmProblem& problem, at::Tensor product);
// Computes bias_grad as the sum over k, from lhs. A no-op if it is not requested.
void compute_unfused_bias_grad(const GemmProblem& problem);

}  // namespace torch_overlap
