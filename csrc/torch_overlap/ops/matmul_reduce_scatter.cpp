#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/main_grads.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/regather.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulReduceScatter = MatmulReduceScatter::kName;

// The memory of this rank's part, along scatter_dim, of the sum (or mean) of all ranks' x weight^T,
// plus bias.
Tensor allocate(const MatmulReduceScatter& call, int64_t dim) {
  check_divisible(kMatmulReduceScatter, call.x, dim, call.group_size);
  check_weight(kMatmulReduceScatter, call.x, call.weight);
  TORCH_OVERLAP_CHECK(!call.regather || call.regather->dim() == call.x.dim(), kValue,
                      kMatmulReduceScatter, ": expected regather with ", call.x.dim(),
                      " dimensions, as x has, got shape ", call.regather->sym_sizes(),
                      ". Pass the x of the all_gather_matmul before.");
  if (call.bias) check_bias(kMatmulReduceScatter, call.x, *call.bias, call.weight);
  auto sizes = call.x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / call.group_size;
  sizes.back() = call.weight.sym_size(0);
  return result_memory(kMatmulReduceScatter, "the result", call.into, sizes, call.x.options());
}

Tensor matmul_reduce_scatter_kernel(const MatmulReduceScatter& call) {
  check_group_size(kMatmulReduceScatter, call.group_size);
  check_algorithm(kMatmulReduceScatter, call.algorithm);
  check_choice(kMatmulReduceScatter, "op", "sum avg", call.op);
  const int64_t dim = check_row_dim(kMatmulReduceScatter, call.x, call.scatter_dim, "scatter_dim");
  auto out = allocate(call, dim);
  if (is_shape_only(call.x)) return out;
  (void)split_main_grads(kMatmulReduceScatter, call.main_grads, {call.weight}, call.x);
  GemmArgs args;
  args.lhs = operand(to_rows(call.x, dim));
  args.rhs = transposed_operand(call.weight);
  const ReduceScatterProducts products{
      .op = kMatmulReduceScatter,
      .comm = find_comm(kMatmulReduceScatter, call.comm, call.group_size),
      .gemms = {std::move(args)},
      .bias = call.bias.value_or(Tensor()),
      .mean = call.op == "avg",
      .out = writable_rows(out, dim)};
  const auto algorithm = choose_forward(problem_of(products), call.algorithm, products.comm);
  if (!algorithm) return out;
  run_reduce_scatter(products, *algorithm);
  copy_rows_back(products.out, out, dim);
  return out;
}

// The gradient of x, and of the weight if `weight_wanted` without main_grads (else empty, of shape
// [0]): with G = all_gather(grad) they are G weight, which is all_gather_matmul(grad, weight^T),
// and G^T x.
// The second product reads G where it was gathered, and runs beside the gather of `regather`.
struct MatmulReduceScatterBackward {
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "_matmul_reduce_scatter_backward";
  Tensor grad;
  Tensor x;
  Tensor weight;
  bool weight_wanted;
  std::string_view comm;
  int64_t group_size;
  int64_t scatter_dim;
  std::string_view algorithm;
  std::optional<Tensor> regather;
  std::vector<Tensor> main_grads{};  // no argument of the operator, whose schema names no memory
  TORCH_OVERLAP_FIELDS(grad, x, weight, weight_wanted, comm, group_size, scatter_dim, algorithm,
                       regather);
};

void add_products(const std::vector<Tensor>& main_grads, const Tensor& grad_rows,
                  const Tensor& inputs) {
  for (auto& args : products_into(main_grads, grad_rows, inputs)) {
    Product(kMatmulReduceScatter, std::move(args)).run();
  }
}

MatmulReduceScatterBackward::Result matmul_reduce_scatter_backward_kernel(
    const MatmulReduceScatterBackward& call) {
  const int64_t dim = call.scatter_dim;
  auto sizes = call.grad.sym_sizes().vec();
  sizes[dim] *= call.group_size;
  sizes.back() = call.weight.sym_size(1);
  MatmulReduceScatterBackward::Result out{at::empty_symint(sizes, call.grad.options()),
                                          empty_if(call.weight_wanted && call.main_grads.empty(),
                                                   call.weight.sym_sizes(), call.grad.options())};
  if (is_shape_only(call.grad)) return out;
  auto& [x_grad, weight_grad] = out;
  GemmArgs args;
  args.rhs = operand(call.weight);
  args.out = writable_rows(x_grad, dim);
  // Chosen, measured and reported as the operator that it is without the weight's gradient.
  GatherProducts products{.op = AllGatherMatmul::kName,
                          .comm = find_comm(AllGatherMatmul::kName, call.comm, call.group_size),
                          .own = to_rows(call.grad, dim),
                          .gemms = {std::move(args)}};
  const auto algorithm = choose_forward(problem_of(products), call.algorithm, products.comm);
  if (!algorithm) return out;
  if (call.weight_wanted || call.regather) {
    products.use_rows = [&](const Tensor& gathered) {
      if (call.regather) start_regather(products.comm, *call.regather, dim);
      if (!call.weight_wanted) return;
      const auto inputs = to_rows(call.x, dim);
      if (!call.main_grads.empty()) return add_products(call.main_grads, gathered, inputs);
      GemmArgs product;
      product.lhs = operand(gathered.t());
      product.rhs = {.data = inputs};
      product.out = weight_grad;
      Product(kMatmulReduceScatter, std::move(product)).run();
    };
  }
  run_gather(products, *algorithm);
  copy_rows_back(products.gemms[0].out, x_grad, dim);
  return out;
}

// The operator; with main_grads its kernel.
MatmulReduceScatterBackward::Result matmul_reduce_scatter_backward(
    const MatmulReduceScatterBackward& call) {
  if (call.main_grads.empty()) return Operator<MatmulReduceScatterBackward>::dispatch(call);
  const BelowAutograd guard;
  return matmul_reduce_scatter_backward_kernel(call);
}

}  // namespace

// With g the gradient (divided by the group size for a mean) and G = all_gather(g):
//   x: G weight    weight: G^T x    bias: g summed over rows
void MatmulReduceScatter::backward(Backward<MatmulReduceScatter>& pass) {
  const MatmulReduceScatter& call = pass.call;
  if (!pass.grads[0].defined()) return;
  if (pass.wants(call.bias)) pass.set(call.bias, pass.grads[0].flatten(0, -2).sum(0));
  const bool x_wanted = pass.wants(call.x);
  const bool weight_wanted = pass.wants(call.weight);
  if (!x_wanted && !weight_wanted) return;
  const int64_t dim = call.scatter_dim < 0 ? call.scatter_dim + call.x.dim() : call.scatter_dim;
  const auto grad = call.op == "avg" ? pass.grads[0].div(call.group_size) : pass.grads[0];
  std::vector<Tensor> main_grads;
  if (auto all = split_main_grads(kMatmulReduceScatter, call.main_grads, {call.weight}, call.x);
      !all.empty() && weight_wanted) {
    check_may_add(kMatmulReduceScatter, {grad, call.x});
    main_grads = std::move(all.front());
  }
  const bool adds = !main_grads.empty();
  if (x_wanted && !at::GradMode::is_enabled()) {
    auto [x_grad, weight_grad] = matmul_reduce_scatter_backward({.grad = grad,
                                                                 .x = call.x,
                                                                 .weight = call.weight,
                                                                 .weight_wanted = weight_wanted,
                                                                 .comm = call.comm,
                                                                 .group_size = call.group_size,
                                                                 .scatter_dim = dim,
                                                                 .algorithm = call.algorithm,
                                                                 .regather = call.regather,
                                                                 .main_grads = main_grads});
    pass.set(call.x, std::move(x_grad));
    if (weight_wanted && !adds) pass.set(call.weight, std::move(weight_grad));
    if (call.regather) {
      torch::autograd::Engine::get_default_engine().queue_callback(
          [comm = find_comm(kMatmulReduceScatter, call.comm, call.group_size)] {
            drop_regathered(comm);
          });
    }
    return;
  }
  Tensor gathered;
  if (x_wanted) {  // double backward may be requested
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
  if (adds) return add_products(main_grads, to_rows(gathered, dim), to_rows(call.x, dim));
  if (weight_wanted) {
    pass.set(call.weight, gathered.flatten(0, -2).t().mm(call.x.flatten(0, -2)));
  }
}

Tensor matmul_reduce_scatter(const MatmulReduceScatter& call) {
  return Operator<MatmulReduceScatter>::dispatch(call);
}

void matmul_reduce_scatter_into(MatmulReduceScatter call, const Tensor& result) {
  const BelowAutograd guard;
  call.into = &result;
  (void)matmul_reduce_scatter_kernel(call);
}

TORCH_OVERLAP_OPERATOR(MatmulReduceScatter, matmul_reduce_scatter_kernel)
TORCH_OVERLAP_AUTOGRAD(MatmulReduceScatter, autograd_kernel<MatmulReduceScatter>)
TORCH_OVERLAP_AUTOCAST(MatmulReduceScatter)
TORCH_OVERLAP_OPERATOR(MatmulReduceScatterBackward, matmul_reduce_scatter_backward_kernel)

}  // namespace torch_overlap::ops
