#pragma once

#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// Reductions composed of data movement and a local reduction, so that every backend supports every
// (op, dtype) pair. Deterministic: parts are combined in rank order. 8- and 16-bit floats
// accumulate in fp32 and are rounded once; all other types accumulate in their own type.
//
// all_reduce of large tensors: all-to-all of chunks, local reduction, all-gather, which moves 2
// (n-1)/n of the bytes, as a ring does. Small tensors: all-gather, local reduction.
TORCH_OVERLAP_API void composed_all_reduce(Primitives& primitives, const at::Tensor& tensor,
                                           const ReduceOp& op);
// Gathers to the root, which reduces. The other ranks' tensors are unchanged.
TORCH_OVERLAP_API void composed_reduce(Primitives& primitives, const at::Tensor& tensor,
                                       const ReduceOp& op, int root);
// All-to-all, local reduction. Parts may differ in size.
TORCH_OVERLAP_API void composed_reduce_scatter(Primitives& primitives, const at::Tensor& tensor,
                                               const RankTensors& in, const ReduceOp& op);

// Combines `parts` (in rank order, of equal shape) into `out`, which may be one of them. `factors`
// is undefined, or holds one fp64 number per part (PREMUL_SUM). Runs on the current stream.
TORCH_OVERLAP_API void reduce_parts(const at::Tensor& out, const std::vector<at::Tensor>& parts,
                                    RedOpType op, const at::Tensor& factors);

}  // namespace torch_overlap
