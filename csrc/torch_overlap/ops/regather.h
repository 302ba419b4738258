#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "torch_overlap/comm/torch_comm.h"

// Gathers that a backward pass starts before the operator that needs them. The backward pass of a
// row-parallel layer starts the gather of the input of the column-parallel layer before it, which
// then runs beside the products and the element-wise work in between:
//
//   forward    all_gather_matmul(x)   activation   matmul_reduce_scatter(h, ..., regather=x)
//   backward   take_regathered(x)     activation   start_regather(x), gradient of the weight
//
// Thread-safe.
namespace torch_overlap::ops {

// Starts the gather of x along dimension `dim`, on the communicator's own stream.
void start_regather(const std::shared_ptr<TorchComm>& comm, const at::Tensor& x, int64_t dim);
// Returns the rows of all ranks, [size * rows, features] with `dim` first, valid on the current
// stream, if their gather was started; only once.
std::optional<at::Tensor> take_regathered(const std::shared_ptr<TorchComm>& comm,
                                          const at::Tensor& x, int64_t dim);
// Waits on the current stream for the gathers that nothing has taken, and releases them.
void drop_regathered(const std::shared_ptr<TorchComm>& comm);

}  // namespace torch_overlap::ops
