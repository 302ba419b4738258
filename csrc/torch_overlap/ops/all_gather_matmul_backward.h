#pragma once

#include "torch_overlap/ops/main_grads.h"

namespace torch_overlap::ops {

// The gradient of all_gather_matmul: of x if `x_wanted`, and of the weights `wanted`. `gathered`:
// the gathered x if it was saved; `gathered_grad`: its gradient; `features`: of all weights of the
// layer, of which `weights` are those whose products have a gradient. Gradients that are not wanted
// are empty, of shape [0].
struct AllGatherMatmulBackward {
  using Result = std::tuple<Tensor, std::vector<Tensor>>;
  static constexpr const char* kName = "_all_gather_matmul_backward";
  std::vector<Tensor> grads;
  Tensor x;
  std::vector<Tensor> weights;
  std::optional<Tensor> gathered;
  std::optional<Tensor> gathered_grad;
  bool x_wanted;
  at::IntArrayRef wanted;
  std::string_view comm;
  int64_t group_size;
  int64_t gather_dim;
  int64_t features;
  std::string_view algorithm;
  // No argument of the operator, whose schema does not name memory that is written: of each weight
  // that is wanted; or empty.
  WeightBuffers main_grads{};
  TORCH_OVERLAP_FIELDS(grads, x, weights, gathered, gathered_grad, x_wanted, wanted, comm,
                       group_size, gather_dim, features, algorithm);
};

// The operator; with main_grads its kernel, which then returns no gradients of weights.
AllGatherMatmulBackward::Result all_gather_matmul_backward(const AllGatherMatmulBackward& call);

}  // namespace torch_overlap::ops
