#pragma once

#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// Reductions made of data movement and a local sum: every backend can do every (op, dtype) pair.
// Deterministic: parts are combined in rank order. 8- and 16-bit floats accumulate in fp32 and are
// rounded once; all other types in their own.
//
// all_reduce of large tensors: all-to-all of chunks, local reduction, all-gather, which moves
// 2 (n-1)/n of the bytes as a ring does; small ones: all-gather, local reduction.
TORCH_OVERLAP_API void composed_all_reduce(Primitives& mover, const at::Tensor& tensor,
                                           const ReduceOp& op);
// Gathers to the root, which reduces. Other ranks' tensors stay as they are.
TORCH_OVERLAP_API void composed_reduce(Primitives& mover, const at::Tensor& tensor,
                                       const ReduceOp& op, int root);
// All-to-all, local reduction. Parts may differ in size.
TORCH_OVERLAP_API void composed_reduce_scatter(Primitives& mover, const at::Tensor& tensor,
                                               const Blocks& in, const ReduceOp& op);

// Combines `parts` (rank order, equal shapes) into `out`, which may be one of them. `factors` is
// empty, or one fp64 number for each part (PREMUL_SUM). Runs on the current stream.
TORCH_OVERLAP_API void reduce_parts(const at::Tensor& out, const std::vector<at::Tensor>& parts,
                                    RedOpType op, const at::Tensor& factors);

}  // namespace torch_overlap
