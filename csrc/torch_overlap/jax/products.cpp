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

ffi::Future all_gather_matmul(ffi::Context context, Instance* instance, int32_t ordinal, Input x,
                              Input weight, Input bias, Output out, Output gathered, int64_t axis,
                              int64_t dim, std::string_view algorithm) {
  constexpr std::string_view kOp = "all_gather_matmul";
  return guarded([&] {
    const Caller caller{context, instance, ordinal};
    const DeviceRank rank = find_rank(kOp, axis, ordinal);
    const auto device = rank.comm->device();
    return run(caller, rank,
               [comm = rank.comm, dim, algorithm = std::string(algorithm),
                in = operands(kOp, x, weight, bias, device),
                result = as_tensor(kOp, "the result", *out, device),
                rows = as_optional(kOp, "the gathered rows", *gathered, device)] {
                 ops::OptionalTensors biases;
                 if (in.bias) biases.push_back(in.bias);
                 const auto [products, all] =
                     ops::all_gather_matmul({.x = in.x,
                                             .weights = {in.weight},
                                             .biases = biases,
                                             .comm = comm->name(),
                                             .group_size = comm->size(),
                                             .gather_dim = dim,
                                             .return_gathered = rows.has_value(),
                                             .algorithm = algorithm});
                 result.copy_(products[0]);
                 if (rows) rows->copy_(all);
               });
  });
}

ffi::Future matmul_reduce_scatter(ffi::Context context, Instance* instance, int32_t ordinal,
                                  Input x, Input weight, Input bias, Output out, int64_t axis,
                                  int64_t dim, std::string_view algorithm) {
  constexpr std::string_view kOp = "matmul_reduce_scatter";
  return guarded([&] {
    const Caller caller{context, instance, ordinal};
    const DeviceRank rank = find_rank(kOp, axis, ordinal);
    const auto device = rank.comm->device();
    return run(caller, rank,
               [comm = rank.comm, dim, algorithm = std::string(algorithm),
                in = operands(kOp, x, weight, bias, device),
                result = as_tensor(kOp, "the result", *out, device)] {
                 result.copy_(ops::matmul_reduce_scatter({.x = in.x,
                                                          .weight = in.weight,
                                                          .bias = in.bias,
                                                          .comm = comm->name(),
                                                          .group_size = comm->size(),
                                                          .scatter_dim = dim,
                                                          .algorithm = algorithm}));
               });
  });
}

ffi::Future matmul_all_reduce(ffi::Context context, Instance* instance, int32_t ordinal, Input x,
                              Input weight, Input bias, Output out, int64_t axis,
                              std::string_view algorithm) {
  constexpr std::string_view kOp = "matmul_all_reduce";
  return guarded([&] {
    const Caller caller{context, instance, ordinal};
    const DeviceRank rank = find_rank(kOp, axis, ordinal);
    const auto device = rank.comm->device();
    return run(caller, rank,
               [comm = rank.comm, algorithm = std::string(algorithm),
                in = operands(kOp, x, weight, bias, device),
                result = as_tensor(kOp, "the result", *out, device)] {
                 result.copy_(ops::matmul_all_reduce({.x = in.x,
                                                      .weight = in.weight,
                                                      .bias = in.bias,
                                                      .comm = comm->name(),
                                                      .group_size = comm->size(),
                                                      .algorithm = algorithm}));
               });
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
