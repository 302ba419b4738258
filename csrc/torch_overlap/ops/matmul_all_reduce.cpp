#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulAllReduce = MatmulAllReduce::kName;

// The memory of the sum (or mean) of all ranks' x weight^T, plus bias.
Tensor allocate(const MatmulAllReduce& call) {
  check_group_size(kMatmulAllReduce, call.group_size);
  check_algorithm(kMatmulAllReduce, call.algorithm);
  check_choice(kMatmulAllReduce, "op", "sum avg", call.op);
  check_row_dim(kMatmulAllReduce, call.x, 0, "rows");
  check_weight(kMatmulAllReduce, call.x, call.weight);
  if (call.bias) check_bias(kMatmulAllReduce, call.x, *call.bias, call.weight);
  auto sizes = call.x.sym_sizes().vec();
  sizes.back() = call.weight.sym_size(0);
  return result_memory(kMatmulAllReduce, "the result", call.into, sizes, call.x.options());
}

Tensor matmul_all_reduce_kernel(const MatmulAllReduce& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  const auto product =
      product_of(call, find_comm(kMatmulAllReduce, call.comm, call.group_size), out);
  const auto algorithm = choose_forward(problem_of(product), call.algorithm, product.comm);
  if (algorithm) run_all_reduce(product, *algorithm);
  return out;
}

// The gradient, P -> R.
//
// With g the gradient and A = all_reduce(g):
//   x: A weight    weight: A^T x    bias: g summed over rows
// Pipelined: the pieces of g are reduced in the background while the rows of x's gradient are
// computed.
struct MatmulAllReduceBackward {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "_matmul_all_reduce_backward";
  Tensor grad;
  Tensor x;
  Tensor weight;
  bool x_wanted;
  bool weight_wanted;
  std::string_view comm;
  int64_t group_size;
  std::string_view op;
  std::string_view algorithm;
  TORCH_OVERLAP_FIELDS(grad, x, weight, x_wanted, weight_wanted, comm, group_size, op, algorithm);
};

bool is_pipelined(const std::shared_ptr<TorchComm>& comm, const Tensor& sum,
                  std::string_view algorithm) {
  // The operand of the reduction exists before the product, so channels have no use here.
  const bool uses_channels = algorithm == "p2p" || algorithm == "fused";
  const bool is_whole = algorithm == "low_latency" || algorithm == "bulk";
  const auto without_channels = uses_channels ? "pipelined" : is_whole ? "sequential" : algorithm;
  const auto chosen = choose_algorithm({.op = kMatmulAllReduce,
                                        .dtype = sum.scalar_type(),
                                        .chunk_rows = sum.size(0) / kNumAllReduceChunks,
                                        .is_all_reduce = true},
                                       without_channels, comm);
  return chosen != Algorithm::sequential;
}

MatmulAllReduceBackward::Result matmul_all_reduce_backward_kernel(
    const MatmulAllReduceBackward& call) {
  const Tensor& weight = call.weight;
  MatmulAllReduceBackward::Result out{
      empty_if(call.x_wanted, call.x.sym_sizes(), call.x.options()),
      empty_if(call.weight_wanted, weight.sym_sizes(), call.x.options())};
  if (is_shape_only(call.x)) return out;
  auto& [x_grad, weight_grad] = out;
  const auto comm = find_comm(kMatmulAllReduce, call.comm, call.group_size);
  const RedOpType reduction = call.op == "avg" ? RedOpType::AVG : RedOpType::SUM;
  const auto sum = call.grad.flatten(0, -2).clone(at::MemoryFormat::Contiguous);
  Tensor x_rows = call.x_wanted ? x_grad.flatten(0, -2) : Tensor();
  if (!is_pipelined(comm, sum, call.algorithm)) {
    comm->all_reduce(sum, reduction, /*async_op=*/false);
    if (call.x_wanted) at::mm_out(x_rows, sum, weight);
  } else {
    const auto chunks = row_chunks(sum.size(0), kNumAllReduceChunks);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const ProfilerRange span("chunk_comm", i);
      works.push_back(comm->all_reduce(sum.narrow(0, chunks[i].begin, chunks[i].length), reduction,
                                       /*async_op=*/true));
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      {
        const ProfilerRange span("chunk_wait", i);
        works[i]->wait();
      }
      if (!call.x_wanted) continue;
      const ProfilerRange span("chunk_gemm", i);
      auto chunk = x_rows.narrow(0, chunks[i].begin, chunks[i].length);
      at::mm_out(chunk, sum.narrow(0, chunks[i].begin, chunks[i].length), weight);
    }
  }
  if (call.weight_wanted) at::mm_out(weight_grad, sum.t(), to_rows(call.x, 0));
  return out;
}

}  // namespace

AllReduceProduct product_of(const MatmulAllReduce& call, const std::shared_ptr<TorchComm>& comm,
                            const Tensor& out) {
  GemmArgs args;
  args.lhs = operand(to_rows(call.x, 0));
  args.rhs = transposed_operand(call.weight);
  return {.op = kMatmulAllReduce,
          .comm = comm,
          .gemm = std::move(args),
          .bias = call.bias.value_or(Tensor()),
          .mean = call.op == "avg",
          .out = as_rows(out)};
}

void MatmulAllReduce::backward(Backward<MatmulAllReduce>& pass) {
  const MatmulAllReduce& call = pass.call;
  const Tensor& grad = pass.grads[0];
  if (!grad.defined()) return;
  if (pass.wants(call.bias)) pass.set(call.bias, grad.flatten(0, -2).sum(0));
  const bool x_wanted = pass.wants(call.x);
  const bool weight_wanted = pass.wants(call.weight);
  if (!x_wanted && !weight_wanted) return;
  if (at::GradMode::is_enabled()) {  // double backward may be requested
    const auto sum = ops::all_reduce(grad, call.op, call.comm, call.group_size);
    if (x_wanted) pass.set(call.x, sum.matmul(call.weight));
    if (weight_wanted) {
      pass.set(call.weight, sum.flatten(0, -2).t().mm(call.x.flatten(0, -2)));
    }
    return;
  }
  auto [x_grad, weight_grad] =
      Operator<MatmulAllReduceBackward>::dispatch({.grad = grad,
                                                   .x = call.x,
                                                   .weight = call.weight,
                                                   .x_wanted = x_wanted,
                                                   .weight_wanted = weight_wanted,
                                                   .comm = call.comm,
                                                   .group_size = call.group_size,
                                                   .op = call.op,
                                                   .algorithm = call.algorithm});
  if (x_wanted) pass.set(call.x, std::move(x_grad));
  if (weight_wanted) pass.set(call.weight, std::move(weight_grad));
}

Tensor matmul_all_reduce(const MatmulAllReduce& call) {
  return Operator<MatmulAllReduce>::dispatch(call);
}

void matmul_all_reduce_into(MatmulAllReduce call, const Tensor& result) {
  const BelowAutograd guard;
  call.into = &result;
  (void)matmul_all_reduce_kernel(call);
}

TORCH_OVERLAP_OPERATOR(MatmulAllReduce, matmul_all_reduce_kernel)
TORCH_OVERLAP_AUTOGRAD(MatmulAllReduce, autograd_kernel<MatmulAllReduce>)
TORCH_OVERLAP_AUTOCAST(MatmulAllReduce)
TORCH_OVERLAP_OPERATOR(MatmulAllReduceBackward, matmul_all_reduce_backward_kernel)

}  // namespace torch_overlap::ops
