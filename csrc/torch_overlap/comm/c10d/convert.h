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

// A contiguous copy that an operation writes in place of a tensor, which then becomes equal to it.
struct CopyBack {
  at::Tensor from;
  at::Tensor to;
};
void copy_back(const std::vector<CopyBack>& copies);

// Ranks exchange elements in their logical (row-major) order, whatever the strides of each rank's
// tensor. These return the tensor itself if its memory has that order, else a contiguous copy. A
// tensor that is not strided is returned as it is; validation refuses it.
//
// An operation only reads it.
at::Tensor read_in_order(const at::Tensor& tensor);
std::vector<at::Tensor> read_in_order(const std::vector<at::Tensor>& tensors);
// It writes every element, and reads them before with `reads`. Throws if elements of the tensor
// share memory, as those of expand() do.
at::Tensor write_in_order(const at::Tensor& tensor, std::vector<CopyBack>& copies, bool reads,
                          std::string_view op);
// The same for outputs of one operation. One that shares memory with an earlier output, or with one
// of `inputs`, gets a copy too: inputs stay until they are read, and the last output's data stays.
std::vector<at::Tensor> write_in_order(const std::vector<at::Tensor>& tensors,
                                       std::vector<CopyBack>& copies, bool reads,
                                       std::string_view op,
                                       const std::vector<at::Tensor>& inputs = {});

// c10d's lists of one element, from the time when one process drove several devices.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, std::string_view op);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    std::string_view op);
// The same for lists that count at the root only: elsewhere they come as [] or [[]].
std::vector<at::Tensor> root_list(const std::vector<std::vector<at::Tensor>>& lists, bool is_root,
                                  std::string_view op);

}  // namespace torch_overlap
