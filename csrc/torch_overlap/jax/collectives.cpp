#include <ATen/ops/empty.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/jax/call.h"
#include "torch_overlap/jax/tensors.h"
#include "torch_overlap/ops/ops.h"

// Collectives of a mesh axis. Python has checked shapes; what it cannot know is checked here.
namespace torch_overlap::jax {
namespace {

using at::Tensor;
using Comm = std::shared_ptr<TorchComm>;
using Input = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

// Calls body(comm, x, out) on the rank.
template <typename Body>
Call collective(std::string_view op, int ordinal, int64_t axis, const Input& x, const Output& out,
                const Body& body) {
  const DeviceRank rank = find_rank(op, axis, ordinal);
  const auto device = rank.comm->device();
  return {rank, [body, comm = rank.comm, x = as_tensor(op, "x", x, device),
                 out = as_tensor(op, "the result", *out, device)] { body(comm, x, out); }};
}

// XLA may pass the same memory for both.
void copy_unless_same(const Tensor& out, const Tensor& x) {
  if (out.data_ptr() != x.data_ptr()) out.copy_(x);
}

// Returns `x` with dimension `dim` cut into one part per rank, which comes first; contiguous.
Tensor parts_of(std::string_view op, const Tensor& x, int64_t dim, int64_t size) {
  TORCH_OVERLAP_CHECK(dim >= 0 && dim < x.dim() && x.size(dim) % size == 0, kValue, op,
                      ": expected a dimension that ", size, " ranks can share, got dimension ", dim,
                      " of shape ", x.sizes(), ". Pad it.");
  return x.unflatten(dim, {size, x.size(dim) / size}).movedim(dim, 0).contiguous();
}

// Writes parts [size, ...], in the order of ranks, behind each other along `dim`.
void join_parts(const Tensor& parts, int64_t dim, const Tensor& out) {
  const int64_t size = parts.size(0);
  out.unflatten(dim, {size, out.size(dim) / size}).copy_(parts.movedim(0, dim));
}

// Returns memory for parts that join_parts() writes to `out`: `out` itself if they are in order.
Tensor received_parts(const Tensor& out, int64_t dim, int64_t size) {
  auto sizes = out.sizes().vec();
  sizes.at(dim) /= size;
  sizes.insert(sizes.begin(), size);
  return dim == 0 ? out.view(sizes) : at::empty(sizes, out.options());
}

Call all_reduce(int ordinal, Input x, Output out, int64_t axis, std::string_view op) {
  return collective(
      "all_reduce", ordinal, axis, x, out,
      [op = ReduceOp::parse(op)](const Comm& comm, const Tensor& mine, const Tensor& result) {
        copy_unless_same(result, mine);
        comm->all_reduce(result, op, /*async_op=*/false);
      });
}

Call all_gather(int ordinal, Input x, Output out, int64_t axis, int64_t dim) {
  return collective("all_gather", ordinal, axis, x, out,
                    [dim](const Comm& comm, const Tensor& mine, const Tensor& result) {
                      const auto parts = received_parts(result, dim, comm->size());
                      comm->all_gather_single(parts, mine, /*async_op=*/false);
                      if (dim != 0) join_parts(parts, dim, result);
                    });
}

Call reduce_scatter(int ordinal, Input x, Output out, int64_t axis, int64_t dim,
                    std::string_view op) {
  return collective(
      "reduce_scatter", ordinal, axis, x, out,
      [dim, op = ReduceOp::parse(op)](const Comm& comm, const Tensor& mine, const Tensor& result) {
        const auto parts = parts_of("reduce_scatter", mine, dim, comm->size());
        comm->reduce_scatter_single(result, parts, op, /*async_op=*/false);
      });
}

Call all_to_all(int ordinal, Input x, Output out, int64_t axis, int64_t split_dim,
                int64_t concat_dim) {
  return collective(
      "all_to_all", ordinal, axis, x, out,
      [split_dim, concat_dim](const Comm& comm, const Tensor& mine, const Tensor& result) {
        const auto parts = parts_of("all_to_all", mine, split_dim, comm->size());
        const auto received = received_parts(result, concat_dim, comm->size());
        comm->all_to_all_single(received, parts, /*async_op=*/false);
        if (concat_dim != 0) join_parts(received, concat_dim, result);
      });
}

Call broadcast(int ordinal, Input x, Output out, int64_t axis, int64_t root) {
  return collective("broadcast", ordinal, axis, x, out,
                    [root](const Comm& comm, const Tensor& mine, const Tensor& result) {
                      copy_unless_same(result, mine);
                      comm->broadcast(result, static_cast<int>(root), /*async_op=*/false);
                    });
}

Call permute(int ordinal, Input x, Output out, int64_t axis, ffi::Span<const int64_t> pairs) {
  return collective("permute", ordinal, axis, x, out,
                    [pairs = std::vector<int64_t>(pairs.begin(), pairs.end())](
                        const Comm& comm, const Tensor& mine, const Tensor& result) {
                      result.copy_(ops::permute(mine, pairs, comm->name()));
                    });
}

}  // namespace
}  // namespace torch_overlap::jax

#define TORCH_OVERLAP_JAX_COLLECTIVE(name, function, ...)                                       \
  TORCH_OVERLAP_JAX_HANDLER(name,                                                               \
                            torch_overlap::jax::Stages<&torch_overlap::jax::function>::execute, \
                            TORCH_OVERLAP_JAX_BIND(kExecute)                                    \
                                .Arg<xla::ffi::AnyBuffer>()                                     \
                                .Ret<xla::ffi::AnyBuffer>()                                     \
                                .Attr<int64_t>("axis") __VA_ARGS__)

TORCH_OVERLAP_JAX_COLLECTIVE(AllReduce, all_reduce, .Attr<std::string_view>("op"))
TORCH_OVERLAP_JAX_COLLECTIVE(AllGather, all_gather, .Attr<int64_t>("dim"))
TORCH_OVERLAP_JAX_COLLECTIVE(ReduceScatter, reduce_scatter,
                             .Attr<int64_t>("dim").Attr<std::string_view>("op"))
TORCH_OVERLAP_JAX_COLLECTIVE(AllToAll, all_to_all,
                             .Attr<int64_t>("split_dim").Attr<int64_t>("concat_dim"))
TORCH_OVERLAP_JAX_COLLECTIVE(Broadcast, broadcast, .Attr<int64_t>("root"))
TORCH_OVERLAP_JAX_COLLECTIVE(Permute, permute, .Attr<xla::ffi::Span<const int64_t>>("pairs"))
