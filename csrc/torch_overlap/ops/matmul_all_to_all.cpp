#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulAllToAll = MatmulAllToAll::kName;

// Allocates all_to_all(linear(x, weight, bias), -1, 0) for each weight: [size * tokens, ..., n_i /
// size].
std::vector<Tensor> allocate(const MatmulAllToAll& call) {
  const Tensor& x = call.x;
  check_group_size(kMatmulAllToAll, call.group_size);
  check_exchange_algorithm(kMatmulAllToAll, call.algorithm);
  check_row_dim(kMatmulAllToAll, x, 0, "tokens");
  check_weight_count(kMatmulAllToAll, call.weights.size(), call.biases.size());
  auto sizes = x.sym_sizes().vec();
  sizes[0] *= call.group_size;
  std::vector<Tensor> out;
  for (size_t i = 0; i < call.weights.size(); ++i) {
    const Tensor& weight = call.weights[i];
    check_weight(kMatmulAllToAll, x, weight, static_cast<int64_t>(i));
    const auto features = weight.sym_size(0);
    TORCH_OVERLAP_CHECK((features % call.group_size).sym_eq(0).expect_true(__FILE__, __LINE__),
                        kValue, kMatmulAllToAll,
                        ": expected out_features divisible by the group size ", call.group_size,
                        " for weights[", i, "], got ", features, " in shape ", weight.sym_sizes(),
                        ". Pad it, or give each rank whole heads.");
    const auto bias = optional_at(call.biases, i);
    if (bias) check_bias(kMatmulAllToAll, x, *bias, weight, static_cast<int64_t>(i));
    sizes.back() = features / call.group_size;
    out.push_back(at::empty_symint(sizes, x.options()));
  }
  return out;
}

// The product of features [begin, begin + the columns of out) of a weight.
void multiply_features(const MatmulAllToAll& call, size_t i, const Tensor& inputs, int64_t begin,
                       const Tensor& out) {
  const int64_t length = out.size(1);
  const auto bias = optional_at(call.biases, i);
  GemmArgs args;
  args.lhs = operand(inputs);
  args.rhs = transposed_operand(call.weights[i].narrow(0, begin, length));
  args.out = out;
  if (bias) args.epilogue.bias = bias->narrow(0, begin, length).contiguous();
  args.overlaps_communication = length < call.weights[i].size(0);
  Product(kMatmulAllToAll, std::move(args)).run();
}

std::vector<Tensor> matmul_all_to_all_kernel(const MatmulAllToAll& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  const auto comm = find_comm(kMatmulAllToAll, call.comm, call.group_size);
  const auto inputs = to_rows(call.x, 0);
  std::vector<Tensor> results;
  std::vector<int64_t> bytes;
  int64_t features = 0;
  for (const auto& result : out) {
    results.push_back(result.flatten(0, -2));
    bytes.push_back(static_cast<int64_t>(result.nbytes()));
    features += call.group_size * result.size(-1);
  }
  const auto chosen = choose_exchange(
      {.op = kMatmulAllToAll,
       .dtype = call.x.scalar_type(),
       .global_shape = GemmShape{inputs.size(0) * call.group_size, features, inputs.size(1)},
       .chunk_rows = inputs.size(0),
       .reduce_scatter_bytes = ColumnExchange::channel_bytes(bytes)},
      call.algorithm, comm);
  if (!chosen) return out;
  if (chosen == Algorithm::sequential) {
    for (size_t i = 0; i < results.size(); ++i) {
      const auto product = at::empty({inputs.size(0), call.weights[i].size(0)}, call.x.options());
      multiply_features(call, i, inputs, 0, product);
      all_to_all_columns(*comm, product, results[i]);
    }
    return out;
  }
  const auto outputs = ColumnExchange::start(kMatmulAllToAll, comm, results, *chosen);
  for (size_t step = 0; step < outputs->steps(); ++step) {
    for (size_t i = 0; i < results.size(); ++i) {
      {
        const ProfilerRange span("chunk_gemm", step);
        const auto part = outputs->part(i, step);
        multiply_features(call, i, inputs, outputs->chunk(step) * part.size(1), part);
      }
      outputs->send(i, step);
    }
  }
  outputs->wait_all();
  return out;
}

// The gradient. With g_i the gradient of result i and G_i = all_to_all(g_i, 0, -1):
//   x: sum_i G_i weights[i]    weights[i]: G_i^T x    biases[i]: G_i summed over rows
// Pipelined: each piece of rows of x's gradient is computed while the next piece of the G_i
// travels.
struct MatmulAllToAllBackward {
  using Result = std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>>;
  static constexpr const char* kName = "_matmul_all_to_all_backward";
  std::vector<Tensor> grads;
  Tensor x;
  std::vector<Tensor> weights;
  bool x_wanted;
  at::IntArrayRef weights_wanted;
  at::IntArrayRef biases_wanted;
  std::string_view comm;
  int64_t group_size;
  std::string_view algorithm;
  TORCH_OVERLAP_FIELDS(grads, x, weights, x_wanted, weights_wanted, biases_wanted, comm, group_size,
                       algorithm);
};

MatmulAllToAllBackward::Result allocate(const MatmulAllToAllBackward& call) {
  const auto options = call.x.options();
  MatmulAllToAllBackward::Result out;
  auto& [x_grad, weight_grads, bias_grads] = out;
  x_grad = empty_if(call.x_wanted, call.x.sym_sizes(), options);
  for (const int64_t i : call.weights_wanted) {
    weight_grads.push_back(at::empty_symint(call.weights[i].sym_sizes(), options));
  }
  for (const int64_t i : call.biases_wanted) {
    bias_grads.push_back(at::empty_symint({call.weights[i].sym_size(0)}, options));
  }
  return out;
}

// Computes x's gradient, piece by piece of its rows.
void multiply_for_x(const MatmulAllToAllBackward& call, RowExchange& outputs,
                    const Tensor& x_rows) {
  const auto& weights = call.weights;
  // Several 16-bit gradients are multiplied as one concatenated product, which is rounded once.
  const bool joins = weights.size() > 1 && c10::isReducedFloatingType(call.x.scalar_type());
  const auto joined_weights = joins ? at::cat(weights, 0) : Tensor();
  for (size_t step = 0; step < outputs.steps(); ++step) {
    const auto rows = outputs.wait(step);
    const ProfilerRange span("chunk_gemm", step);
    const auto [begin, length] = outputs.range(step);
    auto target = x_rows.narrow(0, begin, length);
    if (joins) {
      at::mm_out(target, rows, joined_weights);
      continue;
    }
    at::mm_out(target, outputs.columns(rows, 0), weights[0]);
    for (size_t i = 1; i < weights.size(); ++i) {
      target.addmm_(outputs.columns(rows, i), weights[i]);
    }
  }
}

MatmulAllToAllBackward::Result matmul_all_to_all_backward_kernel(
    const MatmulAllToAllBackward& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  auto& [x_grad, weight_grads, bias_grads] = out;
  const auto comm = find_comm(kMatmulAllToAll, call.comm, call.group_size);
  const auto inputs = to_rows(call.x, 0);
  std::vector<Tensor> matrices;
  for (const auto& grad : call.grads) matrices.push_back(to_rows(grad, 0));
  int64_t features = 0;
  for (const auto& weight : call.weights) features += weight.size(0);
  const auto chosen = choose_exchange(
      {.op = kMatmulAllToAll,
       .dtype = call.x.scalar_type(),
       .global_shape = GemmShape{inputs.size(0) * call.group_size, features, inputs.size(1)},
       .chunk_rows = inputs.size(0) / kNumRowPieces,
       .gather_bytes = RowExchange::channel_bytes(matrices)},
      call.algorithm, comm);
  if (!chosen) return out;
  const auto outputs = RowExchange::start(kMatmulAllToAll, comm, matrices, kNumRowPieces, *chosen);
  if (call.x_wanted) multiply_for_x(call, *outputs, x_grad.flatten(0, -2));
  const auto all = outputs->wait_all();
  for (size_t i = 0; i < weight_grads.size(); ++i) {
    at::mm_out(weight_grads[i], outputs->columns(all, call.weights_wanted[i]).t(), inputs);
  }
  for (size_t i = 0; i < bias_grads.size(); ++i) {
    at::sum_out(bias_grads[i], outputs->columns(all, call.biases_wanted[i]), 0);
  }
  outputs->finish();
  return out;
}

// For double backward, in differentiable operations.
void differentiable_backward(Backward<MatmulAllToAll>& pass) {
  const MatmulAllToAll& call = pass.call;
  Tensor x_grad;
  for (size_t i = 0; i < call.weights.size(); ++i) {
    if (!pass.grads[i].defined()) continue;
    const auto output = ops::all_to_all(pass.grads[i], 0, -1, call.comm, call.group_size);
    if (pass.wants(call.x)) {
      const auto part = output.matmul(call.weights[i]);
      x_grad = x_grad.defined() ? x_grad.add(part) : part;
    }
    if (pass.wants(call.weights, i)) {
      pass.set(call.weights, output.flatten(0, -2).t().mm(call.x.flatten(0, -2)), i);
    }
    if (pass.wants(call.biases, i)) pass.set(call.biases, output.flatten(0, -2).sum(0), i);
  }
  if (x_grad.defined()) pass.set(call.x, x_grad);
}

}  // namespace

void MatmulAllToAll::backward(Backward<MatmulAllToAll>& pass) {
  const MatmulAllToAll& call = pass.call;
  // The results that were used, and those of them whose weight or bias needs a gradient.
  std::vector<Tensor> used_grads;
  std::vector<Tensor> used_weights;
  std::vector<int64_t> weights_wanted;
  std::vector<int64_t> biases_wanted;
  std::vector<size_t> weights_at;
  std::vector<size_t> biases_at;
  for (size_t i = 0; i < call.weights.size(); ++i) {
    if (!pass.grads[i].defined()) continue;
    const auto used = static_cast<int64_t>(used_grads.size());
    if (pass.wants(call.weights, i)) {
      weights_wanted.push_back(used);
      weights_at.push_back(i);
    }
    if (pass.wants(call.biases, i)) {
      biases_wanted.push_back(used);
      biases_at.push_back(i);
    }
    used_grads.push_back(pass.grads[i]);
    used_weights.push_back(call.weights[i]);
  }
  const bool x_wanted = pass.wants(call.x);
  if (used_grads.empty() || (!x_wanted && weights_wanted.empty() && biases_wanted.empty())) return;
  if (at::GradMode::is_enabled()) return differentiable_backward(pass);
  auto [x_grad, weight_grads, bias_grads] =
      Operator<MatmulAllToAllBackward>::dispatch({.grads = used_grads,
                                                  .x = call.x,
                                                  .weights = used_weights,
                                                  .x_wanted = x_wanted,
                                                  .weights_wanted = weights_wanted,
                                                  .biases_wanted = biases_wanted,
                                                  .comm = call.comm,
                                                  .group_size = call.group_size,
                                                  .algorithm = call.algorithm});
  if (x_wanted) pass.set(call.x, std::move(x_grad));
  for (size_t i = 0; i < weights_at.size(); ++i) {
    pass.set(call.weights, std::move(weight_grads[i]), weights_at[i]);
  }
  for (size_t i = 0; i < biases_at.size(); ++i) {
    pass.set(call.biases, std::move(bias_grads[i]), biases_at[i]);
  }
}

std::vector<Tensor> matmul_all_to_all(const MatmulAllToAll& call) {
  return Operator<MatmulAllToAll>::dispatch(call);
}

TORCH_OVERLAP_OPERATOR(MatmulAllToAll, matmul_all_to_all_kernel)
TORCH_OVERLAP_AUTOGRAD(MatmulAllToAll, autograd_kernel<MatmulAllToAll>)
TORCH_OVERLAP_AUTOCAST(MatmulAllToAll)
TORCH_OVERLAP_OPERATOR(MatmulAllToAllBackward, matmul_all_to_all_backward_kernel)

}  // namespace torch_overlap::ops
