#pragma once

#include <memory>

#include "torch_overlap/ops/ops.h"
#include "torch_overlap/ops/overlapped.h"

namespace torch_overlap::ops {

// Returns the product of a call that writes to `out`, the result's memory.
AllReduceProduct product_of(const MatmulAllReduce& call, const std::shared_ptr<TorchComm>& comm,
                            const Tensor& out);

}  // namespace torch_overlap::ops
