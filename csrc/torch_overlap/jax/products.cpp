#include "torch_overlap/jax/call.h"
#include "torch_overlap/jax/tensors.h"
#include "torch_overlap/ops/ops.h"

// The overlapped operators. A weight is [in_features, out_features], as JAX writes x @ w.
namespace torch_overlap::jax {
namespace {

using Input = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

struct Operands {
  at::Tensor x;
  at::Tensor weight;  // [out_features, in_features], a view
  std::optional<at::Tensor> bias;
};

Operands operands(std::string_view op, const Input& x, const Input& weight, const Input& bias,
                  c10::Device device) {
  return {as_tensor(op, "x", x, device), as_tensor(op, "w", weight, device).t(),
          as_optional(op, "bias", bias, device)};
}

struct Product {
  std::shared_ptr<TorchComm> comm;
  Operands in;
  at::Tensor result;
  std::optional<at::Tensor> rows;  // the gathered x, if it is a result too
};

// Runs `compute` on the product of the device's rank.
template <typename Compute>
ffi::Future product(std::string_view op, const Caller& caller, int64_t axis, const Input& x,
                    const Input& weight, const Input& bias, const ffi::AnyBuffer& out,
                    const ffi::AnyBuffer* gathered, Compute compute) {
  return guarded([&] {
    const DeviceRank rank = find_rank(op, axis, caller.ordinal);
    const auto device = rank.comm->device();
    Product made{
        .comm = rank.comm,
        .in = operands(op, x, weight, bias, device),
        .result = as_tensor(op, "the result", out, device),
        .rows = gathered ? as_optional(op, "the gathered rows", *gathered, device) : std::nullopt};
    return run(caller, rank,
               [made = std::move(made), compute = std::move(compute)] { compute(made); });
  });
}

ffi::Future all_gather_matmul(ffi::Context context, Instance* instance, int32_t ordinal, Input x,
                              Input weight, Input bias, Output out, Output gathered, int64_t axis,
                              int64_t dim, std::string_view algorithm) {
  return product("all_gather_matmul", {context, instance, ordinal}, axis, x, weight, bias, *out,
                 &*gathered, [dim, algorithm = std::string(algorithm)](const Product& made) {
                   ops::OptionalTensors biases;
                   if (made.in.bias) biases.push_back(made.in.bias);
                   const auto [products, all] =
                       ops::all_gather_matmul({.x = made.in.x,
                                               .weights = {made.in.weight},
                                               .biases = biases,
                                               .comm = made.comm->name(),
                                               .group_size = made.comm->size(),
                                               .gather_dim = dim,
                                               .return_gathered = made.rows.has_value(),
                                               .algorithm = algorithm});
                   made.result.copy_(products[0]);
                   if (made.rows) made.rows->copy_(all);
                 });
}

ffi::Future matmul_reduce_scatter(ffi::Context context, Instance* instance, int32_t ordinal,
                                  Input x, Input weight, Input bias, Output out, int64_t axis,
                                  int64_t dim, std::string_view algorithm) {
  return product("matmul_reduce_scatter", {context, instance, ordinal}, axis, x, weight, bias, *out,
                 nullptr, [dim, algorithm = std::string(algorithm)](const Product& made) {
                   made.result.copy_(ops::matmul_reduce_scatter({.x = made.in.x,
                                                                 .weight = made.in.weight,
                                                                 .bias = made.in.bias,
                                                                 .comm = made.comm->name(),
                                                                 .group_size = made.comm->size(),
                                                                 .scatter_dim = dim,
                                                                 .algorithm = algorithm}));
                 });
}

ffi::Future matmul_all_reduce(ffi::Context context, Instance* instance, int32_t ordinal, Input x,
                              Input weight, Input bias, Output out, int64_t axis,
                              std::string_view algorithm) {
  return product("matmul_all_reduce", {context, instance, ordinal}, axis, x, weight, bias, *out,
                 nullptr, [algorithm = std::string(algorithm)](const Product& made) {
                   made.result.copy_(ops::matmul_all_reduce({.x = made.in.x,
                                                             .weight = made.in.weight,
                                                             .bias = made.in.bias,
                                                             .comm = made.comm->name(),
                                                             .group_size = made.comm->size(),
                                                             .algorithm = algorithm}));
                 });
}

}  // namespace
}  // namespace torch_overlap::jax

#define TORCH_OVERLAP_JAX_BIND_PRODUCT() \
  TORCH_OVERLAP_JAX_BIND()               \
      .Arg<xla::ffi::AnyBuffer>()        \
      .Arg<xla::ffi::AnyBuffer>()        \
      .Arg<xla::ffi::AnyBuffer>()        \
      .Ret<xla::ffi::AnyBuffer>()

TORCH_OVERLAP_JAX_HANDLER(AllGatherMatmulHandler, torch_overlap::jax::all_gather_matmul,
                          TORCH_OVERLAP_JAX_BIND_PRODUCT()
                              .Ret<xla::ffi::AnyBuffer>()
                              .Attr<int64_t>("axis")
                              .Attr<int64_t>("dim")
                              .Attr<std::string_view>("algorithm"))
TORCH_OVERLAP_JAX_HANDLER(MatmulReduceScatterHandler, torch_overlap::jax::matmul_reduce_scatter,
                          TORCH_OVERLAP_JAX_BIND_PRODUCT()
                              .Attr<int64_t>("axis")
                              .Attr<int64_t>("dim")
                              .Attr<std::string_view>("algorithm"))
TORCH_OVERLAP_JAX_HANDLER(
    MatmulAllReduceHandler, torch_overlap::jax::matmul_all_reduce,
    TORCH_OVERLAP_JAX_BIND_PRODUCT().Attr<int64_t>("axis").Attr<std::string_view>("algorithm"))
