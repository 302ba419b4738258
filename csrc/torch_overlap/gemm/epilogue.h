#pragma once

#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// Epilogues as operators of torch: any device, on the current stream, capture-safe.

// Finishes the problem from its product, fp32 (fp64) [m, n], which is overwritten: writes out and
// all that the epilogue and 8-bit out ask for, but for the bias_grad that is a sum over k.
void compose_epilogue(const GemmProblem& problem, at::Tensor product);
// That bias_grad, from lhs; nothing where none is asked.
void compose_bias_grad(const GemmProblem& problem);

}  // namespace torch_overlap
