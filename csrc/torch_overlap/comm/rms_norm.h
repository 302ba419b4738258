#pragma once

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// Applies the epilogue RmsNorm to `sum`, which is already reduced. Uses ATen; adds the residual in
// fp32 (fp64 for fp64 tensors).
void add_rms_norm(const at::Tensor& sum, const RmsNorm& norm);

}  // namespace torch_overlap
