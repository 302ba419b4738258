#pragma once

#include <cstdint>

#include "torch_overlap/gemm/operand.h"

namespace torch_overlap::cublaslt {

// Of a compute capability: whether its tensor cores read operands of a mode. sm_89 and newer read
// one factor for the tensor, Hopper alone blocks of 128, sm_100 and sm_110 MXFP8.
bool reads_scaling(ScalingMode mode, int major, int minor);

// The cublasLtMatmulMatrixScale_t of a mode; -1 without scaling.
int64_t scale_mode_of(ScalingMode mode);

// The scales of an operand in the order that the library reads: themselves, or a copy.
at::Tensor scales_as_read(std::string_view op, const OperandView& operand);

}  // namespace torch_overlap::cublaslt
