#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulAllToAll = "matmul_all_to_all";

// Allocates all_to_all(linear(x, weight, bias), -1, 0) for each weight: [size * tokens, ..., n_i /
// size].
std::vector<Tensor> matmul_all_to_all_out(const Tensor& x, at::TensorList weights,
                                          const OptionalTensors& biases, int64_t group_size,
                                          std::string_view algorithm) {
  check_group_size(kMatmulAllToAll, group_size);
  check_exchange_algorithm(kMatmulAllToAll, algorithm);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kMatmulAllToAll,
                      ": expected x [tokens, ..., features] of two or more dimensions, got shape ",
                      x.sym_sizes(), ". Use x.unsqueeze(0).");
  check_weight_count(kMatmulAllToAll, weights.size(), biases.size());
  auto sizes = x.sym_sizes().vec();
  sizes[0] *= group_size;
  std::vector<Tensor> out;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_weight(kMatmulAllToAll, x, weights[i], static_cast<int64_t>(i));
    const auto features = weights[i].sym_size(0);
    TORCH_OVERLAP_CHECK((features % group_size).sym_eq(0).expect_true(__FILE__, __LINE__), kValue,
                        kMatmulAllToAll, ": expected out_features divisible by the group size ",
                        group_size, " for weights[", i, "], got ", features, " in shape ",
                        weights[i].sym_sizes(), ". Pad it, or give each rank whole heads.");
    const auto bias = biases.empty() ? std::nullopt : biases.get(i);
    if (bias) check_bias(kMatmulAllToAll, x, *bias, weights[i], static_cast<int64_t>(i));
    sizes.back() = features / group_size;
    out.push_back(at::empty_symint(sizes, x.options()));
  }
  return out;
}

std::vector<Tensor> matmul_all_to_all_kernel(const Tensor& x, at::TensorList weights,
                                             const OptionalTensors& biases, std::string_view comm,
                                             int64_t group_size, std::string_view algorithm) {
  auto out = matmul_all_to_all_out(x, weights, biases, group_size, algorithm);
  const auto communicator = find_comm(kMatmulAllToAll, comm, group_size);
  const auto inputs = to_rows(x, 0);
  const auto bias_of = [&](size_t i) { return biases.empty() ? std::nullopt : biases.get(i); };
  std::vector<Tensor> results;
  std::vector<int64_t> bytes;
  int64_t features = 0;
  for (const auto& result : out) {
    results.push_back(result.flatten(0, -2));
    bytes.push_back(static_cast<int64_t>(result.nbytes()));
    features += group_size * result.size(-1);
  }
  const auto chosen = choose_exchange({.op = kMatmulAllToAll,
                                       .dtype = x.scalar_type(),
                                       .m = inputs.size(0) * group_size,
                                       .n = features,
                                       .k = inputs.size(1),
                                       .chunk_rows = inputs.size(0),
                                       .scatter_bytes = ColumnExchange::channel_bytes(bytes)},
                                      algorithm, communicator);
  if (chosen == Algorithm::sequential) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto product = at::empty({inputs.size(0), weights[i].size(0)}, x.options());
      linear_out(kMatmulAllToAll, product, inputs, weights[i], bias_of(i));
      all_to_all_columns(*communicator, product, results[i]);
    }
    return out;
  }
  const auto outputs = ColumnExchange::start(kMatmulAllToAll, communicator, results, chosen);
  for (size_t step = 0; step < outputs->steps(); ++step) {
    for (size_t i = 0; i < weights.size(); ++i) {
      {
        const ProfilerRange span("chunk_gemm", step);
        const auto part = outputs->part(i, step);
        const int64_t begin = outputs->chunk(step) * part.size(1);
        auto bias = bias_of(i);
        if (bias) bias = bias->narrow(0, begin, part.size(1));
        linear_out(kMatmulAllToAll, part, inputs, weights[i].narrow(0, begin, part.size(1)), bias,
                   /*overlaps_communication=*/true);
      }
      outputs->send(i, step);
    }
  }
  outputs->wait_all();
  return out;
}

std::vector<Tensor> matmul_all_to_all_meta(const Tensor& x, at::TensorList weights,
                                           const OptionalTensors& biases, std::string_view,
                                           int64_t group_size, std::string_view algorithm) {
  return matmul_all_to_all_out(x, weights, biases, group_size, algorithm);
}

// The gradient. With g_i the gradient of result i and G_i = all_to_all(g_i, 0, -1):
//   x: sum_i G_i weights[i]    weights[i]: G_i^T x    biases[i]: G_i summed over rows
// Pipelined: each piece of rows of x's gradient is computed while the next piece of the G_i
// travels.

using ExchangeGradients = std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>>;

ExchangeGradients exchange_gradients_out(const Tensor& x, at::TensorList weights, bool x_wanted,
                                         at::IntArrayRef weights_wanted,
                                         at::IntArrayRef biases_wanted) {
  ExchangeGradients out;
  auto& [x_grad, weight_grads, bias_grads] = out;
  x_grad = x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  for (const int64_t i : weights_wanted) {
    weight_grads.push_back(at::empty_symint(weights[i].sym_sizes(), x.options()));
  }
  for (const int64_t i : biases_wanted) {
    bias_grads.push_back(at::empty_symint({weights[i].sym_size(0)}, x.options()));
  }
  return out;
}

ExchangeGradients exchange_gradients_kernel(at::TensorList grads, const Tensor& x,
                                            at::TensorList weights, bool x_wanted,
                                            at::IntArrayRef weights_wanted,
                                            at::IntArrayRef biases_wanted, std::string_view comm,
                                            int64_t group_size, std::string_view algorithm) {
  auto out = exchange_gradients_out(x, weights, x_wanted, weights_wanted, biases_wanted);
  auto& [x_grad, weight_grads, bias_grads] = out;
  const auto communicator = find_comm(kMatmulAllToAll, comm, group_size);
  const auto inputs = to_rows(x, 0);
  std::vector<Tensor> matrices;
  for (const auto& grad : grads) matrices.push_back(to_rows(grad, 0));
  int64_t features = 0;
  for (const auto& weight : weights) features += weight.size(0);
  const auto chosen = choose_exchange({.op = kMatmulAllToAll,
                                       .dtype = x.scalar_type(),
                                       .m = inputs.size(0) * group_size,
                                       .n = features,
                                       .k = inputs.size(1),
                                       .chunk_rows = inputs.size(0) / kNumRowPieces,
                                       .gather_bytes = RowExchange::channel_bytes(matrices)},
                                      algorithm, communicator);
  const auto outputs =
      RowExchange::start(kMatmulAllToAll, communicator, matrices, kNumRowPieces, chosen);
  if (x_wanted) {
    const auto x_rows = x_grad.flatten(0, -2);
    // Several 16-bit gradients are multiplied as one concatenated product, which is rounded once.
    const bool joins = grads.size() > 1 && c10::isReducedFloatingType(x.scalar_type());
    const auto joined_weights = joins ? at::cat(weights, 0) : Tensor();
    for (size_t step = 0; step < outputs->steps(); ++step) {
      const auto rows = outputs->wait(step);
      const ProfilerRange span("chunk_gemm", step);
      const auto [begin, length] = outputs->range(step);
      auto target = x_rows.narrow(0, begin, length);
      if (joins) {
        at::mm_out(target, rows, joined_weights);
        continue;
      }
      at::mm_out(target, outputs->columns(rows, 0), weights[0]);
      for (size_t i = 1; i < weights.size(); ++i) {
        target.addmm_(outputs->columns(rows, i), weights[i]);
      }
    }
  }
  const auto all = outputs->wait_all();
  for (size_t i = 0; i < weights_wanted.size(); ++i) {
    at::mm_out(weight_grads[i], outputs->columns(all, weights_wanted[i]).t(), inputs);
  }
  for (size_t i = 0; i < biases_wanted.size(); ++i) {
    at::sum_out(bias_grads[i], outputs->columns(all, biases_wanted[i]), 0);
  }
  outputs->finish();
  return out;
}

ExchangeGradients exchange_gradients_meta(at::TensorList, const Tensor& x, at::TensorList weights,
                                          bool x_wanted, at::IntArrayRef weights_wanted,
                                          at::IntArrayRef biases_wanted, std::string_view, int64_t,
                                          std::string_view) {
  return exchange_gradients_out(x, weights, x_wanted, weights_wanted, biases_wanted);
}

class MatmulAllToAll : public Function<MatmulAllToAll> {
 public:
  static constexpr bool is_traceable = true;

  // `biases`: those that exist, for the weights `biased`.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int64_t>& biased,
                               std::string_view comm, int64_t group_size,
                               std::string_view algorithm) {
    const BelowAutograd guard;
    OptionalTensors optional_biases;
    if (!biased.empty()) optional_biases.resize(weights.size(), std::nullopt);
    for (size_t i = 0; i < biased.size(); ++i) optional_biases.set(biased[i], biases[i]);
    auto outputs = ops::matmul_all_to_all(x, weights, optional_biases, comm, group_size, algorithm);
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["biased"] = IValue(biased);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto biased = ctx->saved_data["biased"].toIntVector();
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const auto& algorithm = ctx->saved_data["algorithm"].toStringRef();
    const Tensor& x = saved[0];
    const size_t count = saved.size() - 1;

    variable_list result(1 + count + biased.size() + 4);
    const bool x_wanted = ctx->needs_input_grad(0);
    // Results that were used, and the weights and biases of these whose gradient is needed.
    std::vector<Tensor> used_grads;
    std::vector<Tensor> used_weights;
    std::vector<int64_t> used_as(count, -1);
    std::vector<int64_t> weights_wanted;
    std::vector<int64_t> biases_wanted;
    std::vector<size_t> weights_at;
    std::vector<size_t> biases_at;
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i].defined()) continue;
      used_as[i] = static_cast<int64_t>(used_grads.size());
      if (ctx->needs_input_grad(1 + i)) {
        weights_wanted.push_back(used_as[i]);
        weights_at.push_back(1 + i);
      }
      used_grads.push_back(grads[i]);
      used_weights.push_back(saved[1 + i]);
    }
    for (size_t i = 0; i < biased.size(); ++i) {
      const int64_t used = used_as[static_cast<size_t>(biased[i])];
      if (used < 0 || !ctx->needs_input_grad(1 + count + i)) continue;
      biases_wanted.push_back(used);
      biases_at.push_back(1 + count + i);
    }
    if (used_grads.empty()) return result;
    if (!x_wanted && weights_wanted.empty() && biases_wanted.empty()) return result;

    if (at::GradMode::is_enabled()) {  // double backward may be requested
      std::vector<Tensor> outputs;
      for (size_t i = 0; i < used_grads.size(); ++i) {
        outputs.push_back(ops::all_to_all(used_grads[i], 0, -1, comm, group_size));
        if (!x_wanted) continue;
        const auto part = outputs[i].matmul(used_weights[i]);
        result[0] = result[0].defined() ? result[0].add(part) : part;
      }
      for (size_t i = 0; i < weights_wanted.size(); ++i) {
        result[weights_at[i]] = outputs[weights_wanted[i]].flatten(0, -2).t().mm(x.flatten(0, -2));
      }
      for (size_t i = 0; i < biases_wanted.size(); ++i) {
        result[biases_at[i]] = outputs[biases_wanted[i]].flatten(0, -2).sum(0);
      }
      return result;
    }
    static const auto gradients =
        find_op<decltype(exchange_gradients_kernel)>("_matmul_all_to_all_backward");
    auto [x_grad, weight_grads, bias_grads] =
        gradients.call(used_grads, x, used_weights, x_wanted, weights_wanted, biases_wanted, comm,
                       group_size, algorithm);
    if (x_wanted) result[0] = std::move(x_grad);
    for (size_t i = 0; i < weights_at.size(); ++i) {
      result[weights_at[i]] = std::move(weight_grads[i]);
    }
    for (size_t i = 0; i < biases_at.size(); ++i) result[biases_at[i]] = std::move(bias_grads[i]);
    return result;
  }
};

std::vector<Tensor> matmul_all_to_all_autograd(const Tensor& x, at::TensorList weights,
                                               const OptionalTensors& biases, std::string_view comm,
                                               int64_t group_size, std::string_view algorithm) {
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
  // An invalid number of weights or biases also takes the plain path, which reports it.
  if (!differentiable || weights.empty() || (!biases.empty() && biases.size() != weights.size())) {
    const BelowAutograd guard;
    return ops::matmul_all_to_all(x, weights, biases, comm, group_size, algorithm);
  }
  return MatmulAllToAll::apply(x, weights, at::TensorList(existing), biased, comm, group_size,
                               algorithm);
}

}  // namespace

std::vector<Tensor> matmul_all_to_all(const Tensor& x, at::TensorList weights,
                                      const OptionalTensors& biases, std::string_view comm,
                                      int64_t group_size, std::string_view algorithm) {
  static const auto handle = find_op<decltype(matmul_all_to_all_kernel)>("matmul_all_to_all");
  return handle.call(x, weights, biases, comm, group_size, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "matmul_all_to_all(Tensor x, Tensor[] weights, Tensor?[] biases, str comm, int group_size,"
      " str algorithm=\"auto\") -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_matmul_all_to_all_backward(Tensor[] grads, Tensor x, Tensor[] weights, bool x_wanted,"
      " int[] weights_wanted, int[] biases_wanted, str comm, int group_size, str algorithm)"
      " -> (Tensor, Tensor[], Tensor[])",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("matmul_all_to_all", torch_overlap::ops::matmul_all_to_all_kernel);
  m.impl("_matmul_all_to_all_backward", torch_overlap::ops::exchange_gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("matmul_all_to_all", torch_overlap::ops::matmul_all_to_all_meta);
  m.impl("_matmul_all_to_all_backward", torch_overlap::ops::exchange_gradients_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("matmul_all_to_all", torch_overlap::ops::matmul_all_to_all_autograd);
}
