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
#include "torch_overlap/ops/fields.h"

// The operators torch.ops.torch_overlap.* as C++ functions. Each call goes through the dispatcher:
// autograd, autocast, tracing and the Meta kernels see it. docs/reference/operators.md documents
// them.
//
// Every result is valid on the current stream when the call returns. `comm` names a live
// communicator (comm/registry.h) of `group_size` ranks. Meta kernels use group_size only.
namespace torch_overlap::ops {

template <typename Op>
class Backward;  // autograd.h

using at::Tensor;
using OptionalTensors = c10::List<std::optional<Tensor>>;
// Buffers of a call to which its backward pass adds gradients; see ops/main_grads.h.
using MainGrads = std::optional<c10::List<Tensor>>;

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

// The overlapped operators. Each takes its arguments as one value, with fields in the order of the
// schema:
//
//   auto [products, gathered] = ops::all_gather_matmul(
//       {.x = x, .weights = {w}, .comm = "tp", .group_size = 2});
struct AllGatherMatmul {
  using Result = std::tuple<std::vector<Tensor>, Tensor>;
  static constexpr const char* kName = "all_gather_matmul";
  Tensor x;
  std::vector<Tensor> weights;
  OptionalTensors biases{};
  std::string_view comm;
  int64_t group_size = 1;
  int64_t gather_dim = 0;
  bool return_gathered = false;
  std::string_view algorithm = "auto";
  MainGrads main_grads{};
  const Result* into = nullptr;  // see all_gather_matmul_into()
  TORCH_OVERLAP_FIELDS(x, weights, biases, comm, group_size, gather_dim, return_gathered, algorithm,
                       main_grads);
  TORCH_OVERLAP_SAVED(x, weights)
  static std::vector<Tensor> saved_results(const AllGatherMatmul& call,
                                           const std::vector<Tensor>& results);
  static void backward(Backward<AllGatherMatmul>& pass);
};
TORCH_OVERLAP_API AllGatherMatmul::Result all_gather_matmul(const AllGatherMatmul& call);
// ..._into() compute the results into contiguous tensors of the caller, which have their sizes,
// dtypes and device. They compute here: no dispatcher, no autograd.
TORCH_OVERLAP_API void all_gather_matmul_into(AllGatherMatmul call,
                                              const AllGatherMatmul::Result& results);

struct MatmulReduceScatter {
  using Result = Tensor;
  static constexpr const char* kName = "matmul_reduce_scatter";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  int64_t scatter_dim = 0;
  std::string_view op = "sum";
  std::string_view algorithm = "auto";
  // The backward pass starts the gather of this tensor along scatter_dim; see ops/regather.h.
  std::optional<Tensor> regather{};
  MainGrads main_grads{};
  const Result* into = nullptr;
  TORCH_OVERLAP_FIELDS(x, weight, bias, comm, group_size, scatter_dim, op, algorithm, regather,
                       main_grads);
  TORCH_OVERLAP_SAVED(x, weight, regather)
  static void backward(Backward<MatmulReduceScatter>& pass);
};
TORCH_OVERLAP_API Tensor matmul_reduce_scatter(const MatmulReduceScatter& call);
TORCH_OVERLAP_API void matmul_reduce_scatter_into(MatmulReduceScatter call, const Tensor& result);

struct MatmulAllReduce {
  using Result = Tensor;
  static constexpr const char* kName = "matmul_all_reduce";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  std::string_view op = "sum";
  std::string_view algorithm = "auto";
  const Result* into = nullptr;
  TORCH_OVERLAP_FIELDS(x, weight, bias, comm, group_size, op, algorithm);
  TORCH_OVERLAP_SAVED(x, weight)
  static void backward(Backward<MatmulAllReduce>& pass);
};
TORCH_OVERLAP_API Tensor matmul_all_reduce(const MatmulAllReduce& call);
TORCH_OVERLAP_API void matmul_all_reduce_into(MatmulAllReduce call, const Tensor& result);

// The normalized rows and those before the norm; with `next_weight` [n, k], in place of the first
// their product with its transpose.
struct AllReduceRmsNorm {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "all_reduce_rms_norm";
  Tensor x;
  Tensor residual;
  Tensor weight;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  double eps = 1e-6;
  std::optional<Tensor> next_weight{};
  TORCH_OVERLAP_FIELDS(x, residual, weight, bias, comm, group_size, eps, next_weight);
};
TORCH_OVERLAP_API AllReduceRmsNorm::Result all_reduce_rms_norm(const AllReduceRmsNorm& call);

struct MatmulAllReduceRmsNorm {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "matmul_all_reduce_rms_norm";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  Tensor residual;
  Tensor norm_weight;
  std::string_view comm;
  int64_t group_size = 1;
  double eps = 1e-6;
  std::string_view algorithm = "auto";
  std::optional<Tensor> next_weight{};
  TORCH_OVERLAP_FIELDS(x, weight, bias, residual, norm_weight, comm, group_size, eps, algorithm,
                       next_weight);
};
TORCH_OVERLAP_API MatmulAllReduceRmsNorm::Result matmul_all_reduce_rms_norm(
    const MatmulAllReduceRmsNorm& call);

// The same two with the normalized rows as e4m3 values: these, or with `next_weight` their product
// with its transpose; their scale_inv; the rows before the norm; and if `return_norm` the
// normalized rows, else a tensor of shape [0].
struct AllReduceRmsNormQuantize {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static constexpr const char* kName = "all_reduce_rms_norm_quantize";
  static constexpr const char* kResults =
      "(Tensor data, Tensor scale_inv, Tensor residual_out, Tensor norm)";
  Tensor x;
  Tensor residual;
  Tensor weight;
  std::optional<Tensor> bias{};
  std::optional<Tensor> scale{};
  int64_t scaling_mode = 0;
  std::string_view comm;
  int64_t group_size = 1;
  double eps = 1e-6;
  bool return_norm = false;
  std::optional<Tensor> next_weight{};
  std::optional<Tensor> next_weight_scale_inv{};
  TORCH_OVERLAP_FIELDS(x, residual, weight, bias, scale, scaling_mode, comm, group_size, eps,
                       return_norm, next_weight, next_weight_scale_inv);
};

struct MatmulAllReduceRmsNormQuantize {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static constexpr const char* kName = "matmul_all_reduce_rms_norm_quantize";
  static constexpr const char* kResults =
      "(Tensor data, Tensor scale_inv, Tensor residual_out, Tensor norm)";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  Tensor residual;
  Tensor norm_weight;
  std::optional<Tensor> scale{};
  int64_t scaling_mode = 0;
  std::string_view comm;
  int64_t group_size = 1;
  double eps = 1e-6;
  bool return_norm = false;
  std::string_view algorithm = "auto";
  std::optional<Tensor> next_weight{};
  std::optional<Tensor> next_weight_scale_inv{};
  TORCH_OVERLAP_FIELDS(x, weight, bias, residual, norm_weight, scale, scaling_mode, comm,
                       group_size, eps, return_norm, algorithm, next_weight, next_weight_scale_inv);
};

struct AllToAllMatmul {
  using Result = Tensor;
  static constexpr const char* kName = "all_to_all_matmul";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  std::string_view algorithm = "auto";
  TORCH_OVERLAP_FIELDS(x, weight, bias, comm, group_size, algorithm);
  TORCH_OVERLAP_SAVED(x, weight)
  static void backward(Backward<AllToAllMatmul>& pass);
};
TORCH_OVERLAP_API Tensor all_to_all_matmul(const AllToAllMatmul& call);

struct MatmulAllToAll {
  using Result = std::vector<Tensor>;
  static constexpr const char* kName = "matmul_all_to_all";
  Tensor x;
  std::vector<Tensor> weights;
  OptionalTensors biases{};
  std::string_view comm;
  int64_t group_size = 1;
  std::string_view algorithm = "auto";
  TORCH_OVERLAP_FIELDS(x, weights, biases, comm, group_size, algorithm);
  TORCH_OVERLAP_SAVED(x, weights)
  static void backward(Backward<MatmulAllToAll>& pass);
};
TORCH_OVERLAP_API std::vector<Tensor> matmul_all_to_all(const MatmulAllToAll& call);

struct BulkOverlapMatmul {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "bulk_overlap_matmul";
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias{};
  Tensor other;
  std::string_view collective;
  std::string_view comm;
  int64_t group_size = 1;
  int64_t dim = 0;
  std::string_view algorithm = "auto";
  TORCH_OVERLAP_FIELDS(x, weight, bias, other, collective, comm, group_size, dim, algorithm);
  TORCH_OVERLAP_SAVED(x, weight)
  static std::vector<Tensor> non_differentiable(const std::vector<Tensor>& results);
  static void backward(Backward<BulkOverlapMatmul>& pass);
};
TORCH_OVERLAP_API BulkOverlapMatmul::Result bulk_overlap_matmul(const BulkOverlapMatmul& call);

// Helpers of gradients, not part of the public schemas.
// Returns this rank's part of `x` along `dim`: the inverse of an invariant all_gather.
Tensor own_part(const Tensor& x, int64_t dim, std::string_view comm, int64_t group_size);
// Returns the sum over ranks on `root`, zeros elsewhere.
Tensor reduce_to_root(const Tensor& x, int64_t root, std::string_view comm);

}  // namespace torch_overlap::ops
