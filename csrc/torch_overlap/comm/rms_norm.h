#pragma once

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// What follows the sum, when `sum` has it: see RmsNorm. By ATen; h in fp32 (fp64 for fp64).
void add_rms_norm(const at::Tensor& sum, const RmsNorm& norm);

}  // namespace torch_overlap
