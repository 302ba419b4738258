#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "torch_overlap/base/export.h"

// The operators torch.ops.torch_overlap.* as C++ functions. Each call goes through the dispatcher:
// autograd, autocast, tracing and the Meta kernels see it. docs/ops.md documents them.
//
// Every result is valid on the current stream when the call returns. `comm` names a live
// communicator (comm/registry.h) of `group_size` ranks. Meta kernels use group_size only.
namespace torch_overlap::ops {

using at::Tensor;
using OptionalTensors = c10::List<std::optional<Tensor>>;

TORCH_OVERLAP_API Tensor all_reduce(const Tensor& x, std::string_view op, std::string_view comm,
                                    int64_t group_size, std::string_view grad = "R",
                                    const std::optional<at::Scalar>& factor = std::nullopt);
TORCH_OVERLAP_API Tensor all_gather(const Tensor& x, int64_t dim, std::string_view comm,
                                    int64_t group_size, std::string_view grad = "R");
TORCH_OVERLAP_API Tensor reduce_scatter(const Tensor& x, int64_t dim, std::string_view op,
                                        std::string_view comm, int64_t group_size,
                                        const std::optional<at::Scalar>& factor = std::nullopt);
TORCH_OVERLAP_API Tensor all_to_all(const Tensor& x, int64_t split_dim, int64_t concat_dim,
                                    std::string_view comm, int64_t group_size);
TORCH_OVERLAP_API Tensor all_to_all_v(const Tensor& x, c10::SymIntArrayRef out_splits,
                                      c10::SymIntArrayRef in_splits, std::string_view comm);
TORCH_OVERLAP_API Tensor broadcast(const Tensor& x, int64_t root, std::string_view comm);
TORCH_OVERLAP_API Tensor permute(const Tensor& x, at::IntArrayRef pairs, std::string_view comm);
TORCH_OVERLAP_API Tensor reshard(const Tensor& x, std::string_view mesh,
                                 std::string_view from_layout, std::string_view to_layout,
                                 c10::SymIntArrayRef shape);
TORCH_OVERLAP_API void send(const Tensor& x, int64_t dst, std::string_view comm);
TORCH_OVERLAP_API Tensor wait_tensor(const Tensor& x);

TORCH_OVERLAP_API std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim = 0, bool return_gathered = false,
    std::string_view algorithm = "auto");
TORCH_OVERLAP_API Tensor matmul_reduce_scatter(const Tensor& x, const Tensor& weight,
                                               const std::optional<Tensor>& bias,
                                               std::string_view comm, int64_t group_size,
                                               int64_t scatter_dim = 0, std::string_view op = "sum",
                                               std::string_view algorithm = "auto");
TORCH_OVERLAP_API Tensor matmul_all_reduce(const Tensor& x, const Tensor& weight,
                                           const std::optional<Tensor>& bias, std::string_view comm,
                                           int64_t group_size, std::string_view op = "sum",
                                           std::string_view algorithm = "auto");
TORCH_OVERLAP_API std::tuple<Tensor, Tensor> all_reduce_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight,
    const std::optional<Tensor>& bias, std::string_view comm, int64_t group_size,
    double eps = 1e-6);
TORCH_OVERLAP_API std::tuple<Tensor, Tensor> matmul_all_reduce_rms_norm(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const Tensor& residual, const Tensor& norm_weight, std::string_view comm, int64_t group_size,
    double eps = 1e-6, std::string_view algorithm = "auto");
TORCH_OVERLAP_API Tensor all_to_all_matmul(const Tensor& x, const Tensor& weight,
                                           const std::optional<Tensor>& bias, std::string_view comm,
                                           int64_t group_size, std::string_view algorithm = "auto");
TORCH_OVERLAP_API std::vector<Tensor> matmul_all_to_all(const Tensor& x, at::TensorList weights,
                                                        const OptionalTensors& biases,
                                                        std::string_view comm, int64_t group_size,
                                                        std::string_view algorithm = "auto");
TORCH_OVERLAP_API std::tuple<Tensor, Tensor> bulk_overlap_matmul(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& other,
    std::string_view collective, std::string_view comm, int64_t group_size, int64_t dim = 0,
    std::string_view algorithm = "auto");

// Helpers of gradients, not part of the public schemas. The gradient of all_gather_matmul: of x if
// `x_wanted`, and of the weights `wanted`. `gathered`: the gathered x if it was saved;
// `gathered_grad`: its gradient.
std::tuple<Tensor, std::vector<Tensor>> all_gather_matmul_backward(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size,
    int64_t gather_dim, std::string_view algorithm);
// Returns this rank's part of `x` along `dim`: the inverse of an invariant all_gather.
Tensor own_part(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size);
// Returns the sum over ranks on `root`, zeros elsewhere.
Tensor reduce_to_root(const Tensor& x, int64_t root, std::string_view comm);

}  // namespace torch_overlap::ops
