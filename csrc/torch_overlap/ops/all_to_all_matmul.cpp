#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllToAllMatmul = AllToAllMatmul::kName;

// Allocates linear(all_to_all(x, 0, -1), weight, bias): x [tokens, ..., k / size].
Tensor allocate(const AllToAllMatmul& call) {
  check_group_size(kAllToAllMatmul, call.group_size);
  check_exchange_algorithm(kAllToAllMatmul, call.algorithm);
  check_row_dim(kAllToAllMatmul, call.x, 0, "tokens");
  check_divisible(kAllToAllMatmul, call.x, 0, call.group_size);
  check_weight(kAllToAllMatmul, call.x, call.weight, /*index=*/-1, /*ranks=*/call.group_size);
  if (call.bias) check_bias(kAllToAllMatmul, call.x, *call.bias, call.weight);
  auto sizes = call.x.sym_sizes().vec();
  sizes[0] = sizes[0] / call.group_size;
  sizes.back() = call.weight.sym_size(0);
  return at::empty_symint(sizes, call.x.options());
}

Tensor all_to_all_matmul_kernel(const AllToAllMatmul& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  const auto comm = find_comm(kAllToAllMatmul, call.comm, call.group_size);
  const auto rows = out.flatten(0, -2);
  const std::vector<Tensor> matrices{to_rows(call.x, 0)};
  const auto chosen = choose_exchange(
      {.op = kAllToAllMatmul,
       .dtype = call.x.scalar_type(),
       .global_shape = GemmShape{matrices[0].size(0), call.weight.size(0), call.weight.size(1)},
       .chunk_rows = rows.size(0) / kNumRowPieces,
       .gather_bytes = RowExchange::channel_bytes(matrices)},
      call.algorithm, comm);
  if (!chosen) return out;
  GemmArgs whole;
  whole.rhs = transposed_operand(call.weight);
  whole.epilogue.bias = contiguous_or_undefined(call.bias);
  const auto inputs = RowExchange::start(kAllToAllMatmul, comm, matrices, kNumRowPieces, *chosen);
  for (size_t step = 0; step < inputs->steps(); ++step) {
    const auto input = inputs->wait(step);
    const ProfilerRange span("chunk_gemm", step);
    const auto [begin, length] = inputs->range(step);
    GemmArgs args = whole;
    args.lhs.data = input;
    args.out = row_view(rows, begin, length);
    args.overlaps_communication = length < rows.size(0);
    Product(kAllToAllMatmul, std::move(args)).run();
  }
  inputs->finish();
  return out;
}

// The gradient. With g the gradient of the result and A = all_to_all(x, 0, -1):
//   x: all_to_all(g weight, -1, 0)    weight: g^T A    bias: g summed over rows
// Pipelined: A is exchanged again while the first columns of g weight are computed. Each part of g
// weight travels while the next one is computed, and the last one during the product for the
// weight's gradient.
struct AllToAllMatmulBackward {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "_all_to_all_matmul_backward";
  Tensor grad;
  Tensor x;
  Tensor weight;
  bool x_wanted;
  bool weight_wanted;
  std::string_view comm;
  int64_t group_size;
  std::string_view algorithm;
  TORCH_OVERLAP_FIELDS(grad, x, weight, x_wanted, weight_wanted, comm, group_size, algorithm);
};

AllToAllMatmulBackward::Result all_to_all_matmul_backward_kernel(
    const AllToAllMatmulBackward& call) {
  const auto& [x, weight] = std::tie(call.x, call.weight);
  AllToAllMatmulBackward::Result out{empty_if(call.x_wanted, x.sym_sizes(), x.options()),
                                     empty_if(call.weight_wanted, weight.sym_sizes(), x.options())};
  if (is_shape_only(x)) return out;
  auto& [x_grad, weight_grad] = out;
  const auto comm = find_comm(kAllToAllMatmul, call.comm, call.group_size);
  const auto grad_rows = to_rows(call.grad, 0);
  const auto x_rows = call.x_wanted ? x_grad.flatten(0, -2) : Tensor();
  const std::vector<Tensor> matrices =
      call.weight_wanted ? std::vector<Tensor>{to_rows(x, 0)} : std::vector<Tensor>();
  const auto chosen = choose_exchange(
      {.op = kAllToAllMatmul,
       .dtype = x.scalar_type(),
       .global_shape =
           GemmShape{grad_rows.size(0) * call.group_size, weight.size(0), weight.size(1)},
       .chunk_rows = grad_rows.size(0),
       .gather_bytes =
           call.weight_wanted ? std::optional(RowExchange::channel_bytes(matrices)) : std::nullopt,
       .reduce_scatter_bytes = call.x_wanted ? std::optional(ColumnExchange::channel_bytes(
                                                   {static_cast<int64_t>(x_rows.nbytes())}))
                                             : std::nullopt},
      call.algorithm, comm);
  if (!chosen) return out;
  std::unique_ptr<RowExchange> inputs;
  if (call.weight_wanted) {
    inputs = RowExchange::start(kAllToAllMatmul, comm, matrices, /*pieces=*/1, *chosen);
  }
  std::unique_ptr<ColumnExchange> outputs;
  if (call.x_wanted && chosen != Algorithm::sequential) {
    outputs = ColumnExchange::start(kAllToAllMatmul, comm, {x_rows}, *chosen);
    for (size_t step = 0; step < outputs->steps(); ++step) {
      {
        const ProfilerRange span("chunk_gemm", step);
        auto part = outputs->part(0, step);
        at::mm_out(part, grad_rows,
                   weight.narrow(1, outputs->chunk(step) * part.size(1), part.size(1)));
      }
      outputs->send(0, step);
    }
  } else if (call.x_wanted) {
    all_to_all_columns(*comm, at::mm(grad_rows, weight), x_rows);
  }
  if (call.weight_wanted) {
    at::mm_out(weight_grad, grad_rows.t(), inputs->wait_all());
    inputs->finish();
  }
  if (outputs) outputs->wait_all();
  return out;
}

}  // namespace

void AllToAllMatmul::backward(Backward<AllToAllMatmul>& pass) {
  const AllToAllMatmul& call = pass.call;
  const Tensor& grad = pass.grads[0];
  if (!grad.defined()) return;
  if (pass.wants(call.bias)) pass.set(call.bias, grad.flatten(0, -2).sum(0));
  const bool x_wanted = pass.wants(call.x);
  const bool weight_wanted = pass.wants(call.weight);
  if (!x_wanted && !weight_wanted) return;
  if (at::GradMode::is_enabled()) {  // double backward may be requested
    if (x_wanted) {
      pass.set(call.x, ops::matmul_all_to_all({.x = grad,
                                               .weights = {call.weight.t()},
                                               .comm = call.comm,
                                               .group_size = call.group_size,
                                               .algorithm = call.algorithm})[0]);
    }
    if (weight_wanted) {
      const auto inputs = ops::all_to_all(call.x, 0, -1, call.comm, call.group_size);
      pass.set(call.weight, grad.flatten(0, -2).t().mm(inputs.flatten(0, -2)));
    }
    return;
  }
  auto [x_grad, weight_grad] =
      Operator<AllToAllMatmulBackward>::dispatch({.grad = grad,
                                                  .x = call.x,
                                                  .weight = call.weight,
                                                  .x_wanted = x_wanted,
                                                  .weight_wanted = weight_wanted,
                                                  .comm = call.comm,
                                                  .group_size = call.group_size,
                                                  .algorithm = call.algorithm});
  if (x_wanted) pass.set(call.x, std::move(x_grad));
  if (weight_wanted) pass.set(call.weight, std::move(weight_grad));
}

Tensor all_to_all_matmul(const AllToAllMatmul& call) {
  return Operator<AllToAllMatmul>::dispatch(call);
}

TORCH_OVERLAP_OPERATOR(AllToAllMatmul, all_to_all_matmul_kernel)
TORCH_OVERLAP_AUTOGRAD(AllToAllMatmul, autograd_kernel<AllToAllMatmul>)
TORCH_OVERLAP_AUTOCAST(AllToAllMatmul)
TORCH_OVERLAP_OPERATOR(AllToAllMatmulBackward, all_to_all_matmul_backward_kernel)

}  // namespace torch_overlap::ops
