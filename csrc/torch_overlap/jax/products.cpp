#include "torch_overlap/jax/call.h"
#include "torch_overlap/jax/tensors.h"
#include "torch_overlap/ops/ops.h"

// The overlapped operators. A weight is [in_features, out_features], as JAX writes x @ w. They
// compute into XLA's results.
namespace torch_overlap::jax {
namespace {

using Input = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

// The operands of a product on a rank. A body has them, and not the rank: the last one that a body
// had would end the executor on the executor's own thread.
struct Operands {
  Operands(std::string_view op, const DeviceRank& rank, const Input& x, const Input& weight,
           const Input& bias)
      : comm(rank.comm),
        x(as_tensor(op, "x", x, comm->device())),
        weight(as_tensor(op, "w", weight, comm->device()).t()),
        bias(as_optional(op, "bias", bias, comm->device())) {}

  std::shared_ptr<TorchComm> comm;
  at::Tensor x;
  at::Tensor weight;  // [out_features, in_features], a view
  std::optional<at::Tensor> bias;
};

Call all_gather_matmul(int ordinal, Input x, Input weight, Input bias, Output out, Output gathered,
                       int64_t axis, int64_t dim, std::string_view algorithm) {
  constexpr std::string_view kOp = ops::AllGatherMatmul::kName;
  const DeviceRank rank = find_rank(kOp, axis, ordinal);
  const Operands in(kOp, rank, x, weight, bias);
  const auto device = in.comm->device();
  ops::OptionalTensors biases;
  if (in.bias) biases.push_back(in.bias);
  const auto rows = as_optional(kOp, "the gathered rows", *gathered, device);
  const ops::AllGatherMatmul::Result results{{as_tensor(kOp, "the result", *out, device)},
                                             rows.value_or(at::Tensor())};
  return {rank, [in, biases, rows, results, dim, algorithm = std::string(algorithm)] {
            ops::all_gather_matmul_into({.x = in.x,
                                         .weights = {in.weight},
                                         .biases = biases,
                                         .comm = in.comm->name(),
                                         .group_size = in.comm->size(),
                                         .gather_dim = dim,
                                         .return_gathered = rows.has_value(),
                                         .algorithm = algorithm},
                                        results);
          }};
}

Call matmul_reduce_scatter(int ordinal, Input x, Input weight, Input bias, Output out, int64_t axis,
                           int64_t dim, std::string_view algorithm) {
  constexpr std::string_view kOp = ops::MatmulReduceScatter::kName;
  const DeviceRank rank = find_rank(kOp, axis, ordinal);
  const Operands in(kOp, rank, x, weight, bias);
  const auto result = as_tensor(kOp, "the result", *out, in.comm->device());
  return {rank, [in, result, dim, algorithm = std::string(algorithm)] {
            ops::matmul_reduce_scatter_into({.x = in.x,
                                             .weight = in.weight,
                                             .bias = in.bias,
                                             .comm = in.comm->name(),
                                             .group_size = in.comm->size(),
                                             .scatter_dim = dim,
                                             .algorithm = algorithm},
                                            result);
          }};
}

Call matmul_all_reduce(int ordinal, Input x, Input weight, Input bias, Output out, int64_t axis,
                       std::string_view algorithm) {
  constexpr std::string_view kOp = ops::MatmulAllReduce::kName;
  const DeviceRank rank = find_rank(kOp, axis, ordinal);
  const Operands in(kOp, rank, x, weight, bias);
  const auto result = as_tensor(kOp, "the result", *out, in.comm->device());
  return {rank, [in, result, algorithm = std::string(algorithm)] {
            ops::matmul_all_reduce_into({.x = in.x,
                                         .weight = in.weight,
                                         .bias = in.bias,
                                         .comm = in.comm->name(),
                                         .group_size = in.comm->size(),
                                         .algorithm = algorithm},
                                        result);
          }};
}

}  // namespace
}  // namespace torch_overlap::jax

// Two handlers: <name>Handler computes, <name>Initializer prepares.
#define TORCH_OVERLAP_JAX_BIND_PRODUCT(stage) \
  TORCH_OVERLAP_JAX_BIND(stage)               \
      .Arg<xla::ffi::AnyBuffer>()             \
      .Arg<xla::ffi::AnyBuffer>()             \
      .Arg<xla::ffi::AnyBuffer>()             \
      .Ret<xla::ffi::AnyBuffer>()
#define TORCH_OVERLAP_JAX_PRODUCT(name, function, ...)                                           \
  TORCH_OVERLAP_JAX_HANDLER(name,                                                                \
                            torch_overlap::jax::Stages<&torch_overlap::jax::function>::execute,  \
                            TORCH_OVERLAP_JAX_BIND_PRODUCT(kExecute) __VA_ARGS__)                \
  TORCH_OVERLAP_JAX_STAGE(name##Initializer,                                                     \
                          torch_overlap::jax::Stages<&torch_overlap::jax::function>::initialize, \
                          TORCH_OVERLAP_JAX_BIND_PRODUCT(kInitialize) __VA_ARGS__)

TORCH_OVERLAP_JAX_PRODUCT(
    AllGatherMatmul, all_gather_matmul,
    .Ret<xla::ffi::AnyBuffer>().Attr<int64_t>("axis").Attr<int64_t>("dim").Attr<std::string_view>(
        "algorithm"))
TORCH_OVERLAP_JAX_PRODUCT(
    MatmulReduceScatter, matmul_reduce_scatter,
    .Attr<int64_t>("axis").Attr<int64_t>("dim").Attr<std::string_view>("algorithm"))
TORCH_OVERLAP_JAX_PRODUCT(MatmulAllReduce, matmul_all_reduce,
                          .Attr<int64_t>("axis").Attr<std::string_view>("algorithm"))
