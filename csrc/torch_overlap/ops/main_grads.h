#pragma once

#include <string_view>
#include <vector>

#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/ops.h"

// Gradients of weights that the product adds to buffers which outlive a backward pass, as
// Megatron's main_grad. The rows of the buffers, in order, are those of the weights. The buffers
// may change between the forward and the backward pass: they are attributes of a call, not
// operands that autograd saves.
namespace torch_overlap::ops {

using WeightBuffers = std::vector<std::vector<at::Tensor>>;  // of each weight, in order

// Checks the buffers and returns them by weight; nothing if there are none.
WeightBuffers split_main_grads(std::string_view op, const MainGrads& main_grads,
                               const std::vector<at::Tensor>& weights, const at::Tensor& x);
// Refuses a backward pass that is traced or transformed, or whose gradient may be differentiated.
// `tensors`: those that are multiplied.
void check_may_add(std::string_view op, at::TensorList tensors);
// Returns the products that add grad_rows^T inputs to the buffers of one weight.
std::vector<GemmArgs> products_into(const std::vector<at::Tensor>& buffers,
                                    const at::Tensor& grad_rows, const at::Tensor& inputs);

}  // namespace torch_overlap::ops
