#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllGatherMatmul = "all_gather_matmul";

struct Outputs {
  std::vector<Tensor> products;
  Tensor gathered;
};

// gather_dim, non-negative: a dimension of rows, never the one that is multiplied away.
int64_t row_dim(const Tensor& x, int64_t gather_dim) {
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kAllGatherMatmul,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  const int64_t dim = wrap_dim(kAllGatherMatmul, x, gather_dim, "gather_dim");
  TORCH_OVERLAP_CHECK(dim + 1 < x.dim(), kValue, kAllGatherMatmul,
                      ": expected gather_dim to be a dimension of ", "rows, got ", gather_dim,
                      ", the features of shape ", x.sym_sizes(),
                      "; gather x first, with all_gather");
  return dim;
}

// products[i] = all_gather(x, gather_dim) weights[i]^T + biases[i]; the gathered x, or an empty
// one.
Outputs all_gather_matmul_out(const Tensor& x, at::TensorList weights,
                              const OptionalTensors& biases, int64_t group_size, int64_t gather_dim,
                              bool return_gathered, std::string_view algorithm) {
  check_group_size(kAllGatherMatmul, group_size);
  check_algorithm(kAllGatherMatmul, algorithm);
  const int64_t dim = row_dim(x, gather_dim);
  TORCH_OVERLAP_CHECK(!weights.empty(), kValue, kAllGatherMatmul,
                      ": expected one or more weights, got none");
  TORCH_OVERLAP_CHECK(biases.empty() || biases.size() == weights.size(), kValue, kAllGatherMatmul,
                      ": expected no biases or one entry for each of the ", weights.size(),
                      " weights, got ", biases.size(), "; None stands for no bias");
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= group_size;
  Outputs out;
  out.gathered =
      return_gathered ? at::empty_symint(sizes, x.options()) : at::empty({0}, x.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    check_weight(kAllGatherMatmul, x, weights[i]);
    sizes.back() = weights[i].sym_size(0);
    const auto bias = biases.empty() ? std::nullopt : biases.get(i);
    if (bias) check_bias(kAllGatherMatmul, x, *bias, weights[i]);
    out.products.push_back(at::empty_symint(sizes, x.options()));
  }
  return out;
}

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_kernel(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  auto out =
      all_gather_matmul_out(x, weights, biases, group_size, gather_dim, return_gathered, algorithm);
  const auto communicator = find_comm(kAllGatherMatmul, comm, group_size);
  const int64_t dim = row_dim(x, gather_dim);
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  std::vector<Tensor> products;
  for (const auto& product : out.products) products.push_back(rows_of(product, dim));
  const auto multiply = [&](const Tensor& input, int64_t begin) {
    for (size_t i = 0; i < weights.size(); ++i) {
      linear_out(products[i].narrow(0, begin, input.size(0)), input, weights[i],
                 biases.empty() ? std::nullopt : biases.get(i));
    }
  };
  std::optional<Tensor> gathered;
  if (return_gathered) gathered = rows_of(out.gathered, dim);
  const auto chosen = choose_algorithm(kAllGatherMatmul, forward_algorithm(algorithm), communicator,
                                       x.scalar_type(), rows, gather_bytes(*communicator, own), 0)
                          .algorithm;
  if (chosen == Algorithm::ring) {
    std::vector<Tensor> defined_biases(weights.size());
    for (size_t i = 0; i < biases.size(); ++i) {
      defined_biases[i] = std::optional<Tensor>(biases.get(i)).value_or(Tensor());
    }
    ring_gather_multiply(kAllGatherMatmul, communicator, own, weights, defined_biases, products,
                         gathered.value_or(Tensor()));
  } else if (chosen != Algorithm::chunked) {  // a forward pass has nothing for bulk to hide behind
    if (!gathered) gathered = at::empty({group_size * rows, own.size(1)}, x.options());
    communicator->all_gather_single(*gathered, own, /*async_op=*/false);
    multiply(*gathered, 0);
  } else {
    GatherPipeline gather(*communicator, own, gathered);
    for (size_t step = 0; step < gather.steps(); ++step) {
      const auto input = gather.wait(step);
      const Span span("chunk_gemm", step);
      multiply(input, gather.chunk(step) * rows);
    }
  }
  for (size_t i = 0; i < products.size(); ++i) put_rows(products[i], out.products[i], dim);
  if (return_gathered) put_rows(*gathered, out.gathered, dim);
  return {std::move(out.products), std::move(out.gathered)};
}

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_meta(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  auto out =
      all_gather_matmul_out(x, weights, biases, group_size, gather_dim, return_gathered, algorithm);
  return {std::move(out.products), std::move(out.gathered)};
}

// The gradient.
//
// With g_i the gradient of product i and G = all_gather(x):
//   x:          reduce_scatter(sum_i g_i w_i  [+ the gradient of the gathered x])
//   weights[i]: g_i^T G          biases[i]: g_i summed over rows
// Chunked, G is gathered again (unless it was kept) while the first products are computed, each
// partial product travels while the next is computed, and the gradients of the weights hide the
// last.

struct Gradients {
  Tensor x;
  std::vector<Tensor> weights;
};

// `wanted`: indices of the weights whose gradient is asked. What is not asked is empty, of shape
// [0].
Gradients gradients_out(const Tensor& x, at::TensorList weights, bool x_wanted,
                        at::IntArrayRef wanted) {
  Gradients out;
  out.x = x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  for (const int64_t i : wanted) {
    out.weights.push_back(at::empty_symint(weights[i].sym_sizes(), x.options()));
  }
  return out;
}

// The same over the channels. Ring: the gather goes on behind the partial products, which go to
// their owners one by one. Bulk: the gather goes on behind the whole product, and its reduction
// behind the products for the weights.
std::tuple<Tensor, std::vector<Tensor>> gradients_over_channels(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, const std::shared_ptr<TorchComm>& comm, int64_t dim,
    Algorithm algorithm) {
  const auto own = to_rows(x, dim);
  std::vector<Tensor> grad_rows;
  for (const auto& grad : grads) grad_rows.push_back(to_rows(grad, dim));
  auto [x_grad, weight_grads] = gradients_out(x, weights, x_wanted, wanted);

  std::optional<ChannelGather> gather;
  Tensor inputs;
  if (!wanted.empty() && gathered) {
    inputs = to_rows(*gathered, dim);
  } else if (!wanted.empty()) {
    gather.emplace(kAllGatherMatmul, comm, own);
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
    for (const auto& args : weight_products) gemm(kAllGatherMatmul, args);
    return {std::move(x_grad), std::move(weight_grads)};
  }
  ScatterMultiply sum{.inputs = grad_rows,
                      .weights = weights.vec(),
                      .start = gathered_grad ? to_rows(*gathered_grad, dim) : Tensor(),
                      .bias = {},
                      .mean = false,
                      .out = rows_of(x_grad, dim)};
  // Several of a 16-bit dtype are one product of all columns, which is rounded once.
  if (grad_rows.size() > 1 && c10::isReducedFloatingType(x.scalar_type())) {
    sum.inputs = {at::cat(grad_rows, 1)};
    sum.weights = {at::cat(weights, 0)};
  }
  if (algorithm == Algorithm::ring) {
    ring_multiply_scatter(kAllGatherMatmul, comm, sum);
    finish_gather();
    for (const auto& args : weight_products) gemm(kAllGatherMatmul, args);
  } else {
    bulk_multiply_scatter(kAllGatherMatmul, comm, sum, finish_gather, weight_products);
  }
  put_rows(sum.out, x_grad, dim);
  return {std::move(x_grad), std::move(weight_grads)};
}

std::tuple<Tensor, std::vector<Tensor>> gradients_kernel(
    at::TensorList grads, const Tensor& x, at::TensorList weights,
    const std::optional<Tensor>& gathered, const std::optional<Tensor>& gathered_grad,
    bool x_wanted, at::IntArrayRef wanted, std::string_view comm, int64_t group_size,
    int64_t gather_dim, std::string_view algorithm) {
  const auto communicator = find_comm(kAllGatherMatmul, comm, group_size);
  const int64_t dim = row_dim(x, gather_dim);
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  const bool gathers = !wanted.empty() && !gathered;
  const auto chosen = choose_algorithm(kAllGatherMatmul, algorithm, communicator, x.scalar_type(),
                                       rows, gathers ? gather_bytes(*communicator, own) : 0,
                                       x_wanted ? scatter_bytes(*communicator, group_size * rows,
                                                                own.size(1), x.scalar_type())
                                                : 0)
                          .algorithm;
  const bool chunked = chosen == Algorithm::chunked;
  if (chosen == Algorithm::ring || chosen == Algorithm::bulk) {
    return gradients_over_channels(grads, x, weights, gathered, gathered_grad, x_wanted, wanted,
                                   communicator, dim, chosen);
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

  auto [x_grad, weight_grads] = gradients_out(x, weights, x_wanted, wanted);
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

std::tuple<Tensor, std::vector<Tensor>> gradients_meta(at::TensorList, const Tensor& x,
                                                       at::TensorList weights,
                                                       const std::optional<Tensor>&,
                                                       const std::optional<Tensor>&, bool x_wanted,
                                                       at::IntArrayRef wanted, std::string_view,
                                                       int64_t, int64_t, std::string_view) {
  auto out = gradients_out(x, weights, x_wanted, wanted);
  return {std::move(out.x), std::move(out.weights)};
}

class AllGatherMatmul : public Function<AllGatherMatmul> {
 public:
  static constexpr bool is_traceable = true;

  // `biases`: those that exist, for the weights `biased`. Returns the products, then the gathered
  // x.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int64_t>& biased,
                               std::string_view comm, int64_t group_size, int64_t gather_dim,
                               bool return_gathered, std::string_view algorithm) {
    const BelowAutograd guard;
    OptionalTensors optional_biases;
    if (!biased.empty()) optional_biases.resize(weights.size(), std::nullopt);
    for (size_t i = 0; i < biased.size(); ++i) optional_biases.set(biased[i], biases[i]);
    auto [outputs, gathered] = ops::all_gather_matmul(x, weights, optional_biases, comm, group_size,
                                                      gather_dim, return_gathered, algorithm);
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    if (return_gathered) saved.push_back(gathered);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["weights"] = static_cast<int64_t>(weights.size());
    ctx->saved_data["biased"] = IValue(biased);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["gather_dim"] = row_dim(x, gather_dim);
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->set_materialize_grads(false);
    outputs.push_back(std::move(gathered));
    return std::move(outputs);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto count = static_cast<size_t>(ctx->saved_data["weights"].toInt());
    const auto biased = ctx->saved_data["biased"].toIntVector();
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const int64_t dim = ctx->saved_data["gather_dim"].toInt();
    const auto& algorithm = ctx->saved_data["algorithm"].toStringRef();
    const Tensor& x = saved[0];
    const bool kept = saved.size() > 1 + count;
    const Tensor gathered_grad = kept ? grads[count] : Tensor();

    variable_list result(1 + count + biased.size() + 6);
    const bool x_wanted = ctx->needs_input_grad(0);
    // Products that were used, and of these the weights whose gradient is asked.
    std::vector<Tensor> used_grads;
    std::vector<Tensor> used_weights;
    std::vector<int64_t> wanted;
    std::vector<size_t> wanted_at;
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i].defined()) continue;
      if (ctx->needs_input_grad(1 + i)) {
        wanted.push_back(static_cast<int64_t>(used_grads.size()));
        wanted_at.push_back(1 + i);
      }
      used_grads.push_back(grads[i]);
      used_weights.push_back(saved[1 + i]);
    }
    for (size_t i = 0; i < biased.size(); ++i) {
      const auto& grad = grads[static_cast<size_t>(biased[i])];
      if (grad.defined() && ctx->needs_input_grad(1 + count + i)) {
        result[1 + count + i] = grad.flatten(0, -2).sum(0);
      }
    }
    const bool x_reached = x_wanted && (!used_grads.empty() || gathered_grad.defined());
    if (!x_reached && wanted.empty()) return result;

    if (at::GradMode::is_enabled()) {  // a gradient of this gradient may be asked
      if (x_reached) {
        Tensor sum = gathered_grad.defined()
                         ? ops::reduce_scatter(gathered_grad, dim, "sum", comm, group_size)
                         : Tensor();
        for (size_t i = 0; i < used_grads.size(); ++i) {
          const auto part =
              ops::matmul_reduce_scatter(used_grads[i], used_weights[i].t(), std::nullopt, comm,
                                         group_size, dim, "sum", algorithm);
          sum = sum.defined() ? sum.add(part) : part;
        }
        result[0] = sum;
      }
      if (wanted.empty()) return result;
      const auto inputs = kept ? saved.back() : ops::all_gather(x, dim, comm, group_size);
      for (size_t i = 0; i < wanted.size(); ++i) {
        result[wanted_at[i]] =
            used_grads[static_cast<size_t>(wanted[i])].flatten(0, -2).t().mm(inputs.flatten(0, -2));
      }
      return result;
    }

    static const auto gradients =
        find_op<decltype(gradients_kernel)>("_all_gather_matmul_backward");
    auto [x_grad, weight_grads] = gradients.call(
        used_grads, x, used_weights, kept ? std::optional(saved.back()) : std::nullopt,
        gathered_grad.defined() ? std::optional(gathered_grad) : std::nullopt, x_reached, wanted,
        comm, group_size, dim, algorithm);
    if (x_reached) result[0] = std::move(x_grad);
    for (size_t i = 0; i < wanted.size(); ++i) result[wanted_at[i]] = std::move(weight_grads[i]);
    return result;
  }
};

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_autograd(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  std::vector<Tensor> existing;
  std::vector<int64_t> biased;
  bool differentiable = needs_autograd(x);
  for (size_t i = 0; i < biases.size(); ++i) {
    const auto bias = biases.get(i);
    if (!bias || !bias->defined()) continue;
    differentiable |= needs_autograd(*bias);
    existing.push_back(*bias);
    biased.push_back(static_cast<int64_t>(i));
  }
  for (const auto& weight : weights) differentiable |= needs_autograd(weight);
  // Wrong counts go the plain way too, to its message.
  if (!differentiable || weights.empty() || (!biases.empty() && biases.size() != weights.size())) {
    const BelowAutograd guard;
    return ops::all_gather_matmul(x, weights, biases, comm, group_size, gather_dim, return_gathered,
                                  algorithm);
  }
  auto outputs = AllGatherMatmul::apply(x, weights, at::TensorList(existing), biased, comm,
                                        group_size, gather_dim, return_gathered, algorithm);
  auto gathered = std::move(outputs.back());
  outputs.pop_back();
  return {std::move(outputs), std::move(gathered)};
}

}  // namespace

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul(const Tensor& x, at::TensorList weights,
                                                          const OptionalTensors& biases,
                                                          std::string_view comm, int64_t group_size,
                                                          int64_t gather_dim, bool return_gathered,
                                                          std::string_view algorithm) {
  static const auto handle = find_op<decltype(all_gather_matmul_kernel)>("all_gather_matmul");
  return handle.call(x, weights, biases, comm, group_size, gather_dim, return_gathered, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "all_gather_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str comm, int group_size,"
      " int gather_dim=0, bool return_gathered=False, str algorithm=\"auto\")"
      " -> (Tensor[], Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_all_gather_matmul_backward(Tensor[] grads, Tensor x, Tensor[] weights, Tensor? gathered,"
      " Tensor? gathered_grad, bool x_wanted, int[] wanted, str comm, int group_size,"
      " int gather_dim, str algorithm) -> (Tensor, Tensor[])",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_overlap, CompositeExplicitAutograd, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_kernel);
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::gradients_kernel);
}

TORCH_LIBRARY_IMPL(torch_overlap, Meta, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_meta);
  m.impl("_all_gather_matmul_backward", torch_overlap::ops::gradients_meta);
}

TORCH_LIBRARY_IMPL(torch_overlap, Autograd, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_autograd);
}
