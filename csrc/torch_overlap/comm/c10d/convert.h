#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "torch_overlap/comm/reduce_op.h"

namespace torch_overlap {

// c10d's reduction as ours; PREMUL_SUM brings the factor that
// torch.distributed._make_nccl_premul_sum put into it.
ReduceOp from_c10d(const c10d::ReduceOp& op);

// The tensor's memory as a contiguous tensor that shares it, for operations that treat all elements
// alike and write where they read: a dense tensor of any strides (channels_last, transposed)
// becomes the row of its elements as they lie in memory. Ranks must agree on the strides, as they
// must with NCCL. Sparse tensors and tensors with gaps are returned as they are (validation refuses
// the latter).
at::Tensor memory_of(const at::Tensor& tensor);

// c10d's lists of one element, from the time when one process drove several devices.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, std::string_view op);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    std::string_view op);
// The same for lists that count at the root only: elsewhere they come as [] or [[]].
std::vector<at::Tensor> root_list(const std::vector<std::vector<at::Tensor>>& lists, bool is_root,
                                  std::string_view op);

// Two of the tensors share memory.
bool overlap(const std::vector<at::Tensor>& tensors);

}  // namespace torch_overlap
