#pragma once

#include <cstdint>

#include "torch_overlap/gemm/operand.h"

namespace torch_overlap::cublaslt {

// True if the tensor cores of a compute capability support a mode: tensor scaling on sm_89 and
// newer, blocks of 128 on Hopper only, MXFP8 on sm_100 and sm_110.
bool supports_scaling_mode(ScalingMode mode, int major, int minor);

// Returns the cublasLtMatmulMatrixScale_t of a mode; -1 without scaling.
int64_t scale_mode_of(ScalingMode mode);

// Returns the scales of an operand in the layout that the library reads: themselves, or a copy.
at::Tensor scales_in_cublaslt_layout(std::string_view op, const OperandView& operand);

}  // namespace torch_overlap::cublaslt
