#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "torch_overlap/comm/reduce_op.h"

namespace torch_overlap {

// Converts c10d's reduction. PREMUL_SUM carries the factor that
// torch.distributed._make_nccl_premul_sum stored in it.
ReduceOp from_c10d(const c10d::ReduceOp& op);

// A contiguous copy that an operation writes instead of a tensor, to which it is copied afterwards.
struct CopyBack {
  at::Tensor from;
  at::Tensor to;
};
void copy_back(const std::vector<CopyBack>& copies);

// Ranks exchange elements in their logical (row-major) order, whatever the strides of each rank's
// tensor. These functions return the tensor itself if its memory has that order, otherwise a
// contiguous copy. A tensor that is not strided is returned unchanged; validation refuses it.
//
// For tensors that an operation only reads.
at::Tensor contiguous_input(const at::Tensor& tensor);
std::vector<at::Tensor> contiguous_input(const std::vector<at::Tensor>& tensors);
// For tensors of which an operation writes every element, after reading them if `reads`. Throws if
// elements of the tensor share memory, as those of expand() do.
at::Tensor contiguous_output(const at::Tensor& tensor, std::vector<CopyBack>& copies, bool reads,
                             std::string_view op);
// The same for several outputs of one operation. An output that aliases an earlier output or one of
// `inputs` is staged, too: inputs stay valid until they are read, and the last output's data stays.
std::vector<at::Tensor> contiguous_output(const std::vector<at::Tensor>& tensors,
                                          std::vector<CopyBack>& copies, bool reads,
                                          std::string_view op,
                                          const std::vector<at::Tensor>& inputs = {});

// Unwraps c10d's lists of one element, which date from processes that drove several devices.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, std::string_view op);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    std::string_view op);
// The same for lists that are used at the root only: elsewhere they are [] or [[]].
std::vector<at::Tensor> root_list(const std::vector<std::vector<at::Tensor>>& lists, bool is_root,
                                  std::string_view op);

}  // namespace torch_overlap
