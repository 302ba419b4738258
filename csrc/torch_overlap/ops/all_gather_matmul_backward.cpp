#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// As its caller sees it.
constexpr std::string_view kAllGatherGradients = "all_gather_matmul";

// The gradient of all_gather_matmul.
//
// With g_i the gradient of product i and G = all_gather(x):
//   x:          reduce_scatter(sum_i g_i w_i  [+ the gradient of the gathered x])
//   weights[i]: g_i^T G          biases[i]: g_i summed over rows
// Chunked, G is gathered again (unless it was kept) while the first products are computed, each
// partial product travels while the next is computed, and the gradients of the weights hide the
// last.

struct GatherGradients {
  Tensor x;
  std::vector<Tensor> weights;
};

// `wanted`: indices of the weights whose gradient is asked. What is not asked is empty, of shape
// [0].
GatherGradients gather_gradients_out(const Tensor& x, at::TensorList weights, bool x_wanted,
                                     at::IntArrayRef wanted) {
  GatherGradients out;
  out.x = x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  for (const int64_t i : wanted) {
    out.weights.push_back(at::empty_symint(weights[i].sym_sizes(), x.options()));
  }
  return out;
}

// The same over the channels. Ring: the gather goes on behind the partial products, which go to
// their owners one by one. Bulk: the gather goes on behind the whole product, and its reduction
// behind the products for the weights.
std::tuple<Tensor, std::vector<Tensor>> gather_gradients_over_channels(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, const std::shared_ptr<TorchComm>& comm, int64_t dim,
    Algorithm algorithm) {
  const auto own = to_rows(x, dim);
  std::vector<Tensor> grad_rows;
  for (const auto& grad : grads) grad_rows.push_back(to_rows(grad, dim));
  auto [x_grad, weight_grads] = gather_gradients_out(x, weights, x_wanted, wanted);

  std::optional<ChannelGather> gather;
  Tensor inputs;
  if (!wanted.empty() && gathered) {
    inputs = to_rows(*gathered, dim);
  } else if (!wanted.empty()) {
    gather.emplace(kAllGatherGradients, comm, own);
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
    for (const auto& args : weight_products) gemm(kAllGatherGradients, args);
    return {std::move(x_grad), std::move(weight_grads)};
  }
  const auto x_rows = rows_of(x_grad, dim);
  ScatterMultiply sum{.inputs = grad_rows,
                      .weights = weights.vec(),
                      .sum = {.start = gathered_grad ? to_rows(*gathered_grad, dim) : Tensor(),
                              .bias = {},
                              .mean = false,
                              .out = x_rows}};
  // Several of a 16-bit dtype are one product of all columns, which is rounded once.
  if (grad_rows.size() > 1 && c10::isReducedFloatingType(x.scalar_type())) {
    sum.inputs = {at::cat(grad_rows, 1)};
    sum.weights = {at::cat(weights, 0)};
  }
  if (algorithm == Algorithm::ring || algorithm == Algorithm::fused) {
    // No kernel adds the gradient of the gathered x. Where some ranks only have one, they are told
    // that they went different ways.
    sum.sum.fused = algorithm == Algorithm::fused;
    sum.sum.ranks_share_k = false;  // each has as many output features as it likes
    ring_multiply_scatter(kAllGatherGradients, comm, sum);
    finish_gather();
    for (const auto& args : weight_products) gemm(kAllGatherGradients, args);
  } else {
    bulk_multiply_scatter(kAllGatherGradients, comm, sum, finish_gather, weight_products);
  }
  put_rows(x_rows, x_grad, dim);
  return {std::move(x_grad), std::move(weight_grads)};
}

std::tuple<Tensor, std::vector<Tensor>> gather_gradients_kernel(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size, int64_t dim,
    std::string_view algorithm) {
  const auto communicator = find_comm(kAllGatherGradients, comm, group_size);
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  const bool gathers = !wanted.empty() && !gathered;
  int64_t features = 0;
  for (const auto& weight : weights) features += weight.size(0);
  const auto chosen =
      choose_algorithm({.op = kAllGatherGradients,
                        .dtype = x.scalar_type(),
                        .chunk_rows = rows,
                        .gather_bytes = gathers ? gather_bytes(*communicator, own) : 0,
                        .scatter_bytes = x_wanted ? scatter_bytes(*communicator, group_size * rows,
                                                                  own.size(1), x.scalar_type())
                                                  : 0,
                        .local_n = own.size(1),
                        .local_k = features},
                       algorithm == "direct" ? "sequential" : algorithm, communicator);
  const bool chunked = chosen == Algorithm::chunked;
  if (chosen == Algorithm::ring || chosen == Algorithm::bulk || chosen == Algorithm::fused) {
    return gather_gradients_over_channels(grads, x, weights, gathered, gathered_grad, x_wanted,
                                          wanted, communicator, dim, chosen);
  }

  std::optional<GatherPipeline> gather;
  Tensor inputs;
  if (!wanted.empty() && gathered) {
    inputs = to_rows(*gathered, dim);
  } else if (!wanted.empty() && chunked) {
    inputs = at::empty({group_size * rows, own.size(1)}, x.options());
    gather.emplace(*communicator, own, inputs);
  } else if (!wanted.empty()) {
    inputs = at::empty({group_size * rows, own.size(1)}, x.options());
    communicator->all_gather_single(inputs, own, /*async_op=*/false);
  }

  std::vector<Tensor> grad_rows;
  for (const auto& grad : grads) grad_rows.push_back(to_rows(grad, dim));
  const auto start_value = gathered_grad ? to_rows(*gathered_grad, dim) : Tensor();
  // The terms of x's gradient. Several of a 16-bit dtype are one product of all columns, which
  // accumulates in fp32 and is rounded once.
  std::vector<Tensor> x_grads = grad_rows;
  std::vector<Tensor> x_weights = weights.vec();
  if (x_wanted && grad_rows.size() > 1 && c10::isReducedFloatingType(x.scalar_type())) {
    x_grads = {at::cat(grad_rows, 1)};
    x_weights = {at::cat(weights, 0)};
  }
  // sum_i g_i w_i for some rows of the gathered x.
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

  auto [x_grad, weight_grads] = gather_gradients_out(x, weights, x_wanted, wanted);
  const auto x_rows = x_wanted ? rows_of(x_grad, dim) : Tensor();
  std::optional<ScatterPipeline> scatter;
  if (x_wanted && chunked) {
    scatter.emplace(*communicator, rows, own.size(1), x.options());
    for (size_t step = 0; step < scatter->steps(); ++step) {
      {
        const Span span("chunk_gemm", step);
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
  if (x_wanted) put_rows(x_rows, x_grad, dim);
  return {std::move(x_grad), std::move(weight_grads)};
}

std::tuple<Tensor, std::vector<Tensor>> gather_gradients_meta(
    at::TensorList, const Tensor& x, at::TensorList weights, const std::optional<Tensor>&,
    const std::optional<Tensor>&, bool x_wanted, at::IntArrayRef wanted, std::string_view, int64_t,
    int64_t, std::string_view) {
  auto out = gather_gradients_out(x, weights, x_wanted, wanted);
  return {std::move(out.x), std::move(out.weights)};
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>> all_gather_matmul_backward(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size,
    int64_t gather_dim, std::string_view algorithm) {
  static const auto handle =
      find_op<decltype(gather_gradients_kernel)>("_all_gather_matmul_backward");
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
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::gather_gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::gather_gradients_meta);
}
