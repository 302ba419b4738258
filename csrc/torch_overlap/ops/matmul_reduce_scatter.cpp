#include <ATen/ops/empty.h>

#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulReduceScatter = MatmulReduceScatter::kName;

// Allocates this rank's part, along scatter_dim, of the sum (or mean) of all ranks' x weight^T,
// plus bias.
Tensor allocate(const MatmulReduceScatter& call, int64_t dim) {
  check_divisible(kMatmulReduceScatter, call.x, dim, call.group_size);
  check_weight(kMatmulReduceScatter, call.x, call.weight);
  if (call.bias) check_bias(kMatmulReduceScatter, call.x, *call.bias, call.weight);
  auto sizes = call.x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / call.group_size;
  sizes.back() = call.weight.sym_size(0);
  return at::empty_symint(sizes, call.x.options());
}

Tensor matmul_reduce_scatter_kernel(const MatmulReduceScatter& call) {
  check_group_size(kMatmulReduceScatter, call.group_size);
  check_algorithm(kMatmulReduceScatter, call.algorithm);
  check_choice(kMatmulReduceScatter, "op", "sum avg", call.op);
  const int64_t dim = check_row_dim(kMatmulReduceScatter, call.x, call.scatter_dim, "scatter_dim");
  auto out = allocate(call, dim);
  if (is_shape_only(call.x)) return out;
  GemmArgs args;
  args.lhs = operand(to_rows(call.x, dim));
  args.rhs = transposed_operand(call.weight);
  const ScatterProducts problem{.op = kMatmulReduceScatter,
                                .comm = find_comm(kMatmulReduceScatter, call.comm, call.group_size),
                                .gemms = {std::move(args)},
                                .start = {},
                                .bias = call.bias.value_or(Tensor()),
                                .mean = call.op == "avg",
                                .out = writable_rows(out, dim)};
  const auto algorithm = choose_forward(problem_of(problem), call.algorithm, problem.comm);
  if (!algorithm) return out;
  run(problem, *algorithm);
  copy_rows_back(problem.out, out, dim);
  return out;
}

}  // namespace

// With g the gradient (divided by the group size for a mean) and G = all_gather(g):
//   x: G weight, which is all_gather_matmul(g, weight^T)    weight: G^T x
//   bias: g summed over rows
void MatmulReduceScatter::backward(Backward<MatmulReduceScatter>& pass) {
  const MatmulReduceScatter& call = pass.call;
  if (!pass.grads[0].defined()) return;
  if (pass.wants(call.bias)) pass.set(call.bias, pass.grads[0].flatten(0, -2).sum(0));
  const bool weight_wanted = pass.wants(call.weight);
  if (!pass.wants(call.x) && !weight_wanted) return;
  const int64_t dim = call.scatter_dim < 0 ? call.scatter_dim + call.x.dim() : call.scatter_dim;
  const auto grad = call.op == "avg" ? pass.grads[0].div(call.group_size) : pass.grads[0];
  Tensor gathered;
  if (pass.wants(call.x)) {
    auto [products, inputs] = ops::all_gather_matmul({.x = grad,
                                                      .weights = {call.weight.t()},
                                                      .comm = call.comm,
                                                      .group_size = call.group_size,
                                                      .gather_dim = dim,
                                                      .return_gathered = weight_wanted,
                                                      .algorithm = call.algorithm});
    pass.set(call.x, std::move(products[0]));
    gathered = std::move(inputs);
  } else {
    gathered = ops::all_gather(grad, dim, call.comm, call.group_size);
  }
  if (weight_wanted) {
    pass.set(call.weight, gathered.flatten(0, -2).t().mm(call.x.flatten(0, -2)));
  }
}

Tensor matmul_reduce_scatter(const MatmulReduceScatter& call) {
  return Operator<MatmulReduceScatter>::dispatch(call);
}

TORCH_OVERLAP_OPERATOR(MatmulReduceScatter, matmul_reduce_scatter_kernel)
TORCH_OVERLAP_AUTOGRAD(MatmulReduceScatter, autograd_kernel<MatmulReduceScatter>)
TORCH_OVERLAP_AUTOCAST(MatmulReduceScatter)

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str comm, int group_size,"
      " int scatter_dim=0, str op=\"sum\", str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
