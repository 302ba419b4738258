#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// Name of the operator in error messages.
constexpr std::string_view kAllGatherMatmulBackward = "all_gather_matmul";

// The gradient of all_gather_matmul.
//
// With g_i the gradient of product i and G = all_gather(x):
//   x:          reduce_scatter(sum_i g_i w_i  [+ the gradient of the gathered x])
//   weights[i]: g_i^T G          biases[i]: g_i summed over rows
// Pipelined: G is gathered again (unless it was saved) while the first products are computed, each
// partial product travels while the next one is computed, and the products for the weights overlap
// the last transfer.

struct AllGatherMatmulGradients {
  Tensor x;
  std::vector<Tensor> weights;
};

// `wanted`: indices of the weights whose gradient is needed. Gradients that are not needed are
// empty, of shape [0].
AllGatherMatmulGradients allocate_gradients(const Tensor& x, at::TensorList weights, bool x_wanted,
                                            at::IntArrayRef wanted) {
  AllGatherMatmulGradients out;
  out.x = x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  for (const int64_t i : wanted) {
    out.weights.push_back(at::empty_symint(weights[i].sym_sizes(), x.options()));
  }
  return out;
}

// The same over channels. p2p: the gather overlaps the partial products, which are sent to their
// owners one by one. bulk: the gather overlaps the whole product, and the reduction of that product
// overlaps the products for the weights.
std::tuple<Tensor, std::vector<Tensor>> backward_over_channels(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, const std::shared_ptr<TorchComm>& comm, int64_t dim,
    Algorithm algorithm) {
  const auto own = to_rows(x, dim);
  std::vector<Tensor> grad_rows;
  for (const auto& grad : grads) grad_rows.push_back(to_rows(grad, dim));
  auto [x_grad, weight_grads] = allocate_gradients(x, weights, x_wanted, wanted);

  std::optional<ChannelGather> gather;
  Tensor inputs;
  if (!wanted.empty() && gathered) {
    inputs = to_rows(*gathered, dim);
  } else if (!wanted.empty()) {
    gather.emplace(kAllGatherMatmulBackward, comm, own);
    inputs = gather->rows();
  }
  std::vector<GemmArgs> weight_products;
  for (size_t i = 0; i < wanted.size(); ++i) {
    GemmArgs args;
    args.lhs = operand(grad_rows[wanted[i]].t());
    args.rhs = {.data = inputs};
    args.out = weight_grads[i];
    weight_products.push_back(std::move(args));
  }
  const auto finish_gather = [&] {
    if (gather) gather->finish();
  };
  if (!x_wanted) {
    finish_gather();
    for (const auto& args : weight_products) gemm(kAllGatherMatmulBackward, args);
    return {std::move(x_grad), std::move(weight_grads)};
  }
  const auto x_rows = writable_rows(x_grad, dim);
  ScatterMultiply sum{.inputs = grad_rows,
                      .weights = weights.vec(),
                      .sum = {.start = gathered_grad ? to_rows(*gathered_grad, dim) : Tensor(),
                              .bias = {},
                              .mean = false,
                              .out = x_rows}};
  // Several 16-bit gradients are multiplied as one concatenated product, which is rounded once.
  if (grad_rows.size() > 1 && c10::isReducedFloatingType(x.scalar_type())) {
    sum.inputs = {at::cat(grad_rows, 1)};
    sum.weights = {at::cat(weights, 0)};
  }
  if (algorithm == Algorithm::p2p || algorithm == Algorithm::fused) {
    // No fused kernel adds the gradient of the gathered x. If only some ranks have one, an error
    // reports that the ranks took different paths.
    sum.sum.fused = algorithm == Algorithm::fused;
    sum.sum.ranks_share_k = false;  // the number of output features may differ by rank
    channel_scatter_matmul(kAllGatherMatmulBackward, comm, sum);
    finish_gather();
    for (const auto& args : weight_products) gemm(kAllGatherMatmulBackward, args);
  } else {
    bulk_scatter_matmul(kAllGatherMatmulBackward, comm, sum, finish_gather, weight_products);
  }
  copy_rows_back(x_rows, x_grad, dim);
  return {std::move(x_grad), std::move(weight_grads)};
}

std::tuple<Tensor, std::vector<Tensor>> all_gather_matmul_backward_kernel(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size, int64_t dim,
    std::string_view algorithm) {
  const auto communicator = find_comm(kAllGatherMatmulBackward, comm, group_size);
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  const bool gathers = !wanted.empty() && !gathered;
  int64_t features = 0;
  for (const auto& weight : weights) features += weight.size(0);
  const auto chosen =
      choose_algorithm({.op = kAllGatherMatmulBackward,
                        .dtype = x.scalar_type(),
                        .chunk_rows = rows,
                        .gather_bytes = gathers ? gather_bytes(*communicator, own) : 0,
                        .scatter_bytes = x_wanted ? scatter_bytes(*communicator, group_size * rows,
                                                                  own.size(1), x.scalar_type())
                                                  : 0,
                        .local_n = own.size(1),
                        .local_k = features},
                       algorithm == "low_latency" ? "sequential" : algorithm, communicator);
  const bool pipelined = chosen == Algorithm::pipelined;
  if (chosen == Algorithm::p2p || chosen == Algorithm::bulk || chosen == Algorithm::fused) {
    return backward_over_channels(grads, x, weights, gathered, gathered_grad, x_wanted, wanted,
                                  communicator, dim, chosen);
  }

  std::optional<GatherPipeline> gather;
  Tensor inputs;
  if (!wanted.empty() && gathered) {
    inputs = to_rows(*gathered, dim);
  } else if (!wanted.empty() && pipelined) {
    inputs = at::empty({group_size * rows, own.size(1)}, x.options());
    gather.emplace(*communicator, own, inputs);
  } else if (!wanted.empty()) {
    inputs = at::empty({group_size * rows, own.size(1)}, x.options());
    communicator->all_gather_single(inputs, own, /*async_op=*/false);
  }

  std::vector<Tensor> grad_rows;
  for (const auto& grad : grads) grad_rows.push_back(to_rows(grad, dim));
  const auto start_value = gathered_grad ? to_rows(*gathered_grad, dim) : Tensor();
  // The terms of x's gradient. Several 16-bit terms are one concatenated product, which accumulates
  // in fp32 and is rounded once.
  std::vector<Tensor> x_grads = grad_rows;
  std::vector<Tensor> x_weights = weights.vec();
  if (x_wanted && grad_rows.size() > 1 && c10::isReducedFloatingType(x.scalar_type())) {
    x_grads = {at::cat(grad_rows, 1)};
    x_weights = {at::cat(weights, 0)};
  }
  // Computes sum_i g_i w_i for some rows of the gathered x.
  const auto multiply = [&](Tensor target, int64_t begin, int64_t length) {
    if (start_value.defined()) target.copy_(start_value.narrow(0, begin, length));
    for (size_t i = 0; i < x_grads.size(); ++i) {
      const auto grad = x_grads[i].narrow(0, begin, length);
      if (i == 0 && !start_value.defined()) {
        at::mm_out(target, grad, x_weights[i]);
      } else {
        target.addmm_(grad, x_weights[i]);
      }
    }
  };

  auto [x_grad, weight_grads] = allocate_gradients(x, weights, x_wanted, wanted);
  const auto x_rows = x_wanted ? writable_rows(x_grad, dim) : Tensor();
  std::optional<ScatterPipeline> scatter;
  if (x_wanted && pipelined) {
    scatter.emplace(*communicator, rows, own.size(1), x.options());
    for (size_t step = 0; step < scatter->steps(); ++step) {
      {
        const ProfilerRange span("chunk_gemm", step);
        multiply(scatter->partial(step), scatter->chunk(step) * rows, rows);
      }
      scatter->send(step);
    }
  } else if (x_wanted) {
    const auto partial = at::empty({group_size * rows, own.size(1)}, x.options());
    multiply(partial, 0, group_size * rows);
    communicator->reduce_scatter_single(x_rows, partial, RedOpType::SUM, /*async_op=*/false);
  }
  if (gather) gather->wait_all();
  for (size_t i = 0; i < wanted.size(); ++i) {
    at::mm_out(weight_grads[i], grad_rows[wanted[i]].t(), inputs);
  }
  if (scatter) scatter->reduce(x_rows, /*mean=*/false);
  if (x_wanted) copy_rows_back(x_rows, x_grad, dim);
  return {std::move(x_grad), std::move(weight_grads)};
}

std::tuple<Tensor, std::vector<Tensor>> gather_gradients_meta(
    at::TensorList, const Tensor& x, at::TensorList weights, const std::optional<Tensor>&,
    const std::optional<Tensor>&, bool x_wanted, at::IntArrayRef wanted, std::string_view, int64_t,
    int64_t, std::string_view) {
  auto out = allocate_gradients(x, weights, x_wanted, wanted);
  return {std::move(out.x), std::move(out.weights)};
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>> all_gather_matmul_backward(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size,
    int64_t gather_dim, std::string_view algorithm) {
  static const auto handle =
      find_op<decltype(all_gather_matmul_backward_kernel)>("_all_gather_matmul_backward");
  return handle.call(grads, x, weights, gathered, gathered_grad, x_wanted, wanted, comm, group_size,
                     gather_dim, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "_all_gather_matmul_backward(Tensor[] grads, Tensor x, Tensor[] weights, Tensor? gathered,"
      " Tensor? gathered_grad, bool x_wanted, int[] wanted, str comm, int group_size,"
      " int gather_dim, str algorithm) -> (Tensor, Tensor[])",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::all_gather_matmul_backward_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::gather_gradients_meta);
}
